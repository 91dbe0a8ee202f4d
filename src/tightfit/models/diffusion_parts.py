"""The models beside a denoiser, VAE and text encoders, and the peaks of a training's phases: caching what those make,
the steps, and sampling images to look at.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tightfit.devices.present import lookup
from tightfit.errors import InputError, ModelError
from tightfit.models.diffusion import INSTALL_HINT, SCALE, kind_of, predicted
from tightfit.models.dtypes import convert_weights
from tightfit.models.mode import evaluating
from tightfit.models.published import Published, published
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

_VAE = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 2, "norm_num_groups": 32,
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "sample_size": 512,
}  # fmt: skip
_VAE_16 = {**_VAE, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_CLIP = {"model_type": "clip_text_model", "vocab_size": 49408, "max_position_embeddings": 77}
_CLIP_L = {
    **_CLIP, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "quick_gelu", "projection_dim": 768,
}  # fmt: skip
_CLIP_H = {
    **_CLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16,
    "hidden_act": "gelu", "projection_dim": 512,
}  # fmt: skip
_CLIP_BIG_G = {
    **_CLIP, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip
_T5_XXL = {
    "model_type": "t5", "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64,
    "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip


class Encoder(NamedTuple):
    """A text encoder: its class in `transformers`, the fields of its config.json, the tokens of a text."""

    name: str
    config: Mapping[str, Any]
    tokens: int


@dataclass(frozen=True)
class Parts:
    """The other networks of a denoiser. `passes` of the denoiser make a step of sampling: two with guidance by an empty
    text, one where the guidance was distilled. With `vae_in_fp32` the scripts keep the VAE so, whatever the others are.
    """

    vae: Mapping[str, Any]
    encoders: tuple[Encoder, ...]
    passes: int = 2
    vae_in_fp32: bool = False


_PROJECTED = "CLIPTextModelWithProjection"
# By the repository: the subfolders vae, text_encoder, text_encoder_2 and text_encoder_3 of each.
PARTS = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": Parts(_VAE, (Encoder("CLIPTextModel", _CLIP_L, 77),)),
    "stabilityai/stable-diffusion-2-1": Parts(_VAE, (Encoder("CLIPTextModel", _CLIP_H, 77),)),
    "stabilityai/stable-diffusion-xl-base-1.0": Parts(
        _VAE, (Encoder("CLIPTextModel", _CLIP_L, 77), Encoder(_PROJECTED, _CLIP_BIG_G, 77)), vae_in_fp32=True
    ),
    "stabilityai/stable-diffusion-3-medium-diffusers": Parts(
        _VAE_16,
        (
            Encoder(_PROJECTED, _CLIP_L, 77),
            Encoder(_PROJECTED, _CLIP_BIG_G, 77),
            Encoder("T5EncoderModel", _T5_XXL, 77),
        ),
    ),
    "black-forest-labs/FLUX.1-dev": Parts(
        _VAE_16, (Encoder("CLIPTextModel", _CLIP_L, 77), Encoder("T5EncoderModel", _T5_XXL, 512)), passes=1
    ),
}


class Beside(NamedTuple):
    """The models beside a denoiser, frozen."""

    vae: nn.Module
    encoders: tuple[nn.Module, ...]


def build_parts(parts: Parts, dtype: torch.dtype) -> Beside:
    """They with new weights. Raises `ModelError` where a package is missing."""
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise ModelError(f"VAE and text encoders need the package {error.name}: {INSTALL_HINT}") from error
    encoders = []
    for name, config, _ in parts.encoders:
        kind: Any = getattr(transformers, name)
        encoders.append(kind(kind.config_class(**{k: v for k, v in config.items() if k != "model_type"})))
    of_diffusers: Any = diffusers
    vae = of_diffusers.AutoencoderKL.from_config(dict(parts.vae))
    for model in (vae, *encoders):
        model.requires_grad_(False).eval()
        convert_weights(model, torch.float32 if model is vae and parts.vae_in_fp32 else dtype)
    return Beside(vae, tuple(encoders))


@torch.no_grad()
def latents_of(vae: Any, images: Tensor) -> Tensor:
    """The latents of images (B, 3, H, W), drawn as diffusers' scripts do."""
    return vae.encode(images).latent_dist.sample() * vae.config.scaling_factor


@torch.no_grad()
def embedded(encoder: nn.Module, ids: Tensor) -> Tensor:
    """The last but one hidden states of a text encoder for token ids (B, T), or its last ones, by the model."""
    return encoder(ids, output_hidden_states=True).hidden_states[-2 if hasattr(encoder, "text_projection") else -1]


@torch.no_grad()
def images_of(vae: Any, latents: Tensor) -> Tensor:
    """The images of latents (B, C, H / 8, W / 8)."""
    return vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]


@torch.no_grad()
def drawn_latents(model: nn.Module, batch: Mapping[str, Tensor], passes: int, precision: Precision = "fp32") -> Tensor:
    """Latents after some steps of sampling for the texts of a batch; the updates are Euler's, those of flow models."""
    texts = {name: torch.cat([value] * passes) for name, value in batch.items() if name != "latents"}
    latents = torch.randn_like(batch["latents"])
    with evaluating(model), autocast(precision, latents.device.type):
        for step in range(SAMPLING_STEPS):
            at = torch.full((len(latents) * passes,), 1000 - step, device=latents.device)
            found = predicted(model, torch.cat([latents] * passes), at, texts, kind_of(model))
            if passes == 2:
                without, towards = found.chunk(2)
                found = without + GUIDANCE * (towards - without)
            latents = latents - found.to(latents.dtype) / SAMPLING_STEPS
    return latents


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
    size, side = len(batch["latents"]), batch["latents"].shape[-1] * SCALE
    images = torch.zeros(size, 3, side, side, dtype=beside["vae"].dtype)

    def peak(function: Callable[..., Any], *inputs: Any) -> int:
        return trace(function, *inputs, device=device).peak_bytes

    encoding = [
        peak(embedded, encoder, torch.zeros(size, each.tokens, dtype=torch.long))
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
        drawing = peak(drawn_latents, model, batch, parts.passes, precision) + states
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


def parts_of(known: Published | None, name: str) -> Parts:
    """The parts beside a published denoiser. Raises `InputError` for any other model."""
    parts = None if known is None else PARTS.get(known.source)
    if parts is None:
        names = ", ".join(key for key, each in published().items() if each.source in PARTS)
        raise InputError(
            f"--phase is for these diffusion models by name: {names}; {name} is none of them: leave it out"
        )
    return parts


def _together(beside: Beside) -> nn.Module:
    return nn.ModuleDict({"vae": beside.vae, "encoders": nn.ModuleList(beside.encoders)})


def _weights(model: nn.Module) -> int:
    """Bytes of weights and buffers, those under several names once; a model that was built dry has no other sizes."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
