"""What a training step will take, known before it runs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightfit.planner.footing import dtypes_of, footing
from tightfit.planner.records import Footing
from tightfit.planner.request import Request, Tracer, lacking
from tightfit.trace.cuda.workspace import CONTEXT_BYTES


@dataclass(frozen=True)
class Estimate:
    """The predicted memory and time of one training step with no lever applied. Bytes are ints."""

    footing: Footing
    parameters: int
    precision: str
    optimizer: str
    device: str
    device_bytes: int
    assumptions: tuple[str, ...]
    context_bytes: int = 0  # on CUDA: what the process takes of the device outside of the allocator; an assumption
    fits: bool = True  # as it stands, into the device: on CUDA with what the allocator reserves and the context
    worst_peak_bytes: int | None = None  # with all tokens at the fewest experts, where the peak depends on routing
    weights: str = ""  # dtypes of the parameters, the one of most elements first

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak; on CUDA what `torch.cuda.max_memory_allocated` tells."""
        return self.footing.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """On CUDA what `torch.cuda.max_memory_reserved` tells, None on a CPU."""
        return self.footing.reserved_bytes

    @property
    def step_seconds(self) -> float:
        return self.footing.step_seconds

    @property
    def by_category(self) -> Mapping[str, int]:
        """Bytes at the peak: parameters, gradients, optimizer states, activations, inputs, workspace."""
        return self.footing.by_category

    @property
    def peak_phase(self) -> str:
        """Forward, recompute, backward or optimizer."""
        return self.footing.peak_phase

    @property
    def peak_module(self) -> str:
        """Path of the module that is running at the peak; empty at the top level."""
        return self.footing.peak_module

    def to_dict(self) -> dict[str, Any]:
        figures = asdict(self)
        return {**{k: v for k, v in figures.items() if k != "footing"}, **figures["footing"]}

    def to_json(self, path: str | Path) -> None:
        """Write the estimate to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write the estimate as a page for the browser, all in one file. Raises `InputError` where plotly is not
        installed.
        """
        from tightfit.planner.page import estimate_page

        Path(path).write_text(estimate_page(self), encoding="utf-8")

    def to_png(self, path: str | Path) -> None:
        """Draw the memory of the step. Raises `InputError` where matplotlib is not installed."""
        from tightfit.report.picture import memory_picture

        Path(path).write_bytes(memory_picture(self.footing, None))

    def __str__(self) -> str:
        from tightfit.planner.describe import describe_estimate

        return describe_estimate(self)


def make_estimate(request: Request) -> Estimate:
    """Trace the request's step as it stands."""
    tracer = Tracer(request)
    trace = tracer.whole(request.plain, {})
    routed = tracer.routed_peaks(trace, request.plain, {})
    return Estimate(
        footing=footing(trace),
        parameters=sum(p.numel() for p in request.model.parameters()),
        precision=request.settings.precision,
        optimizer=request.optimizer_name,
        device=request.device.name,
        device_bytes=request.device.memory_bytes,
        assumptions=told(trace.assumptions),
        context_bytes=0 if request.role is None else CONTEXT_BYTES,
        fits=not lacking(trace, request.device.memory_bytes),
        worst_peak_bytes=max(trace.peak_bytes, *routed) if routed else None,
        weights=dtypes_of(request.model),
    )


def told(assumptions: Any) -> tuple[str, ...]:
    """The assumptions of a trace as sentences."""
    return tuple(
        f"{a.question} ({a.module or 'top level'}, {a.where}) was assumed {a.answer}"
        + ("; the peak depends on it" if a.moves_peak else "")
        for a in assumptions
    )
