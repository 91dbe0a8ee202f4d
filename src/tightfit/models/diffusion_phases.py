"""The peaks of the phases of training a denoiser: caching what VAE and text encoders make, the steps, and sampling
images to look at.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tightfit.devices.present import lookup
from tightfit.models.diffusion import kind_of, predicted
from tightfit.models.diffusion_parts import (
    Beside,
    Parts,
    build_parts,
    embedded,
    images_of,
    images_of_latents,
    latents_of,
)
from tightfit.models.mode import evaluating
from tightfit.planner.any_code.traced import trace
from tightfit.planner.estimates import Estimate
from tightfit.planner.request import role_of
from tightfit.step import Precision, autocast
from tightfit.tracing.build import build_dry
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.record import Category

PHASES = ("cache", "train", "sample")
PLACES = ("resident", "offloaded", "gone")
Place = Literal["resident", "offloaded", "gone"]
GUIDANCE = 7.5  # of the pipelines of diffusers for Stable Diffusion
SAMPLING_STEPS = 2  # that are run dry: from the second one on all are alike


@torch.no_grad()
def drawn_latents(model: nn.Module, batch: Mapping[str, Tensor], parts: Parts, precision: Precision = "fp32") -> Tensor:
    """Latents after some steps of sampling for the texts of a batch; the updates are Euler's, those of flow models."""
    texts = {name: value for name, value in batch.items() if name != "latents"}
    latents = torch.randn_like(batch["latents"])
    together = parts.passes if parts.in_one_batch else 1
    given = [{name: _repeated(value, together) for name, value in texts.items()}]
    if together < parts.passes:  # of the empty text
        given.append({name: torch.zeros_like(value) for name, value in texts.items()})
    with evaluating(model), autocast(precision, latents.device.type):
        for step in range(SAMPLING_STEPS):
            at = torch.full((len(latents) * together,), 1000 - step, device=latents.device)
            found = [predicted(model, _repeated(latents, together), at, each, kind_of(model)) for each in given]
            flow = _guided(found, together)
            del found
            latents = latents - flow.to(latents.dtype) / SAMPLING_STEPS
    return latents


def _repeated(value: Tensor, times: int) -> Tensor:
    return value if times == 1 else torch.cat([value] * times)


def _guided(found: Sequence[Tensor], together: int) -> Tensor:
    if len(found) == 2:
        towards, without = found
    elif together == 2:
        without, towards = found[0].chunk(2)
    else:
        return found[0]
    return without + GUIDANCE * (towards - without)


@dataclass(frozen=True)
class PhaseEstimate:
    """The predicted peak of a phase, with VAE and text encoders in a place: `resident` on the device all the time,
    `offloaded` to the host but for the one that runs, or `gone` (what they make is cached; sampling keeps the VAE).
    """

    phase: str
    parts: Place
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class PhaseEstimates:
    """The phases of training a denoiser, and the bytes of weights beside it."""

    rows: tuple[PhaseEstimate, ...]
    vae_bytes: int
    encoder_bytes: tuple[int, ...]
    device: str
    device_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def estimate_phases(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    parts: Parts,
    step: Estimate,
    *,
    phases: Sequence[str] = PHASES,
    precision: Precision = "fp32",
    device: Any = None,
) -> PhaseEstimates:
    """The peaks of phases around a training step that was estimated. Nothing is run.

    In `train`, parts that are not gone encode the images and texts of each step. In `sample`, optimizer states stay.
    """
    spec = lookup(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, batch["latents"].dtype)
    beside: Any = build_dry(lambda: _together(build_parts(parts, dtype)))
    own, vae_bytes = step.step_figures.by_category[str(Category.PARAMETER)], _weights(beside["vae"])
    texts = tuple(_weights(encoder) for encoder in beside["encoders"])
    role = role_of(spec)
    # A backward leaves the workspace of its thread's handle of cuBLAS; what runs besides has its own.
    left = 0 if role is None else role.held_by_a_thread
    states = step.step_figures.by_category[str(Category.OPTIMIZER_STATE)] + left
    size, images = len(batch["latents"]), images_of_latents(beside["vae"], batch["latents"])

    def peak(function: Callable[..., Any], model: nn.Module, *inputs: Any) -> int:
        return trace(partial(_later, function), model, *inputs, device=device).peak_bytes

    encoding = [
        peak(partial(embedded, each), encoder, torch.zeros(size, each.tokens, dtype=torch.long))
        for encoder, each in zip(beside["encoders"], parts.encoders, strict=True)
    ]
    every = [peak(latents_of, beside["vae"], images), *encoding]
    all_parts = vae_bytes + sum(texts)
    cached = {"resident": max(p + all_parts - w for p, w in zip(every, (vae_bytes, *texts), strict=True))}
    cached["offloaded"] = max(every)
    found: dict[str, dict[str, int]] = {"cache": cached}
    if "train" in phases:
        found["train"] = {
            "resident": max(step.peak_bytes + all_parts, own + states + cached["resident"]),
            "offloaded": max(step.peak_bytes, own + states + cached["offloaded"]),
            "gone": step.peak_bytes,
        }
    if "sample" in phases:
        decoding = peak(images_of, beside["vae"], torch.zeros_like(batch["latents"]))
        drawing = peak(drawn_latents, model, batch, parts, precision) + states
        found["sample"] = {
            "resident": max(drawing + all_parts, own + states + sum(texts) + decoding),
            "offloaded": max(drawing, own + states + max(decoding, *encoding)),
            "gone": max(drawing + vae_bytes, own + states + decoding),
        }
    room = spec.memory_bytes - (0 if spec.kind == "cpu" else CONTEXT_BYTES)
    rows = [
        PhaseEstimate(phase, place, found[phase][place], found[phase][place] <= room)
        for phase in phases
        for place in PLACES
        if place in found[phase]
    ]
    return PhaseEstimates(tuple(rows), vae_bytes, texts, spec.name, spec.memory_bytes)


def _later(function: Callable[..., Any], model: nn.Module, *inputs: Any) -> Any:
    """The function, in a process that has used cuBLAS: its workspace stays, so only a first call can run without it."""
    small = next(model.parameters()).new_zeros(8, 8, dtype=torch.float32)
    torch.mm(small, small)
    del small
    return function(model, *inputs)


def _together(beside: Beside) -> nn.Module:
    return nn.ModuleDict({"vae": beside.vae, "encoders": nn.ModuleList(beside.encoders)})


def _weights(model: nn.Module) -> int:
    """Bytes of weights and buffers, those under several names once; a model that was built dry has no other sizes."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
