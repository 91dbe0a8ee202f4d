"""What a published figure has a card do: the work of every operator, from a dry run."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.published import timed_models, timed_operators
from torch import Tensor, nn

from tightfit.devices.known import find
from tightfit.devices.work import Work, work_of
from tightfit.step import Part, StepSettings
from tightfit.tracing.build import build_dry
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.record import Phase, StepTrace
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.step import trace_part, trace_step

A_NUMBER = 16  # bytes
_PHASES = {"forward": {Phase.FORWARD}, "backward": {Phase.BACKWARD}}


class _Pricer:
    """Gives each kind of work a number instead of a price, so that a trace shows which work was done when."""

    def __init__(self) -> None:
        self.kinds: list[Work] = []

    def __call__(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any], arguments: tuple) -> float:
        self.kinds.append(work_of(name, inputs, outputs, arguments))
        return float(len(self.kinds) - 1)

    def done(self, trace: StepTrace, phases: set[Phase] | None) -> Counter[Work]:
        return Counter(self.kinds[round(op.seconds)] for op in trace.operators if phases is None or op.phase in phases)


class _Seed(torch.autograd.Function):
    """A loss whose gradients are given: backward starts from them, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        ctx.seeds = results[len(results) // 2 :]
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.seeds, *(None for _ in ctx.seeds))


def work_done(row: dict[str, Any]) -> Counter[Work]:
    """The work behind a row of `seconds.json`, each kind with how often it is done."""
    device = find(row["card"])
    if device is None or device.spec.compute_capability is None or device.spec.sm_count is None:
        raise ValueError(f"{row['id']}: {row['card']} is not a known card")
    role = CudaRole(device.spec.compute_capability, device.spec.sm_count)
    counts = _operator(row, role) if row["kind"] == "operator" else _step(row, role)
    # A single number is the dry run's own seed or the loss: no part of what was timed, or nothing beside it.
    return Counter({work: count for work, count in counts.items() if work.bytes > A_NUMBER})


def _operator(row: dict[str, Any], role: CudaRole) -> Counter[Work]:
    model = build_dry(lambda: timed_operators.CASES[row["config"]["case"]](row["config"]))
    assert isinstance(model, timed_operators.Operator)
    full = row["mode"] == "full"
    summed = getattr(model, "loss", None) if full else None
    seeds = {} if summed or (full and model.draws_gradient) else _seeds(model)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        results = module()
        if summed:
            return summed(results)
        if isinstance(results, Tensor) and results.dim() == 0:
            return results
        results = results if isinstance(results, tuple) else (results,)
        given = [torch.randn_like(r) for r in results] if full and model.draws_gradient else list(seeds.values())
        return _Seed.apply(*results, *given)

    names = model.accumulates_in_full if full else model.accumulates
    held = [name for name, _ in model.named_parameters() if name.partition(".")[0] in names]
    pricer = _Pricer()
    trace = trace_part(
        model, [Part((), 1.0)] * 2, loss, settings=StepSettings(), state_bytes=0, with_gradient=held, cost=pricer,
        role=role,
    )  # fmt: skip
    phases = _PHASES["forward"] | _PHASES["backward"] if full else _PHASES[row["mode"]]
    done = pricer.done(trace, phases)
    return Counter({work: count for work, count in done.items() if work.family is not model.made_before})


def _seeds(model: nn.Module) -> dict[int, Tensor]:
    """Gradients of the results, made before anything is timed."""
    with torch.no_grad():
        results = build_dry_results(model)
    return {i: shape.unbacked() for i, shape in enumerate(results)}


def build_dry_results(model: nn.Module) -> list[TensorShape]:
    """The shapes of a module's results."""
    shapes: list[TensorShape] = []

    def run() -> nn.Module:
        results = model()
        shapes.extend(TensorShape.of(r) for r in (results if isinstance(results, tuple) else (results,)))
        return model

    build_dry(run)
    return shapes


def _loss(module: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return module(*batch)


def _step(row: dict[str, Any], role: CudaRole) -> Counter[Work]:
    config = row["config"]
    model = build_dry(lambda: timed_models.build(config))
    ids = (torch.arange(config["batch"] * config["length"]) % 997).view(config["batch"], config["length"])
    settings = StepSettings(precision=config.get("precision", "fp32"))
    pricer = _Pricer()
    if row["mode"] == "step":
        trace = trace_step(
            model, [Part((ids,), 1.0)], _loss, optimizer=config["optimizer"], settings=settings, cost=pricer, role=role
        )
        return pricer.done(trace, None)
    held = [name for name, _ in model.named_parameters()] if row["source"] == "litgpt-thunder" else []
    parts = [Part((ids,), 1.0)] * (2 if held else 1)
    trace = trace_part(
        model, parts, _loss, settings=settings, state_bytes=0, with_gradient=held, cost=pricer, role=role
    )
    return pricer.done(trace, None)
