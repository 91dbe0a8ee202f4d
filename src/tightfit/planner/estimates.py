"""Predicts the memory and the time of a training step before it runs."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tightfit.devices.spec import DeviceSpec
from tightfit.ops.weights.low_bit import count_weights, frozen_base
from tightfit.planner.levers import Stream
from tightfit.planner.outcome import EstimateRecord
from tightfit.planner.request import Request, Tracer, lacking
from tightfit.planner.step_figures import dtypes_of, step_figures
from tightfit.ranks.messages import sentence
from tightfit.ranks.world import World
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.record import StepTrace
from tightfit.tracing.rules import ONE_SIDED
from tightfit.units import format_bytes


class Estimate(EstimateRecord):
    """An estimate that can be printed, drawn and written to a file."""

    def to_dict(self) -> dict[str, Any]:
        figures = asdict(self)
        whole = {"host_peak_bytes": self.host_peak_bytes, "host_by_category": self.host_by_category}
        return {**{k: v for k, v in figures.items() if k != "step_figures"}, **figures["step_figures"], **whole}

    def to_json(self, path: str | Path) -> None:
        """Write the estimate to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write the estimate as one self-contained HTML file. Raises `InputError` if plotly is not installed."""
        from tightfit.planner.report.plan_page import estimate_page

        Path(path).write_text(estimate_page(self), encoding="utf-8")

    def to_png(self, path: str | Path) -> None:
        """Draw the memory of the step. Raises `InputError` if matplotlib is not installed."""
        from tightfit.planner.report.picture import memory_picture

        Path(path).write_bytes(memory_picture(self.step_figures, None))

    def __str__(self) -> str:
        from tightfit.planner.report.plan_tables import describe_estimate

        return describe_estimate(self)


def make_estimate(request: Request) -> Estimate:
    """Trace the request's step without levers, and return the figures."""
    if request.world is not None:
        return of_ranks(request, request.world)
    tracer = Tracer(request)
    trace = tracer.whole(request.plain, {})
    routed = tracer.routed_peaks(trace, request.plain, {})
    return replace(
        of_trace(request, trace),
        fits=not lacking(trace, request.device.memory_bytes),
        worst_peak_bytes=max(trace.peak_bytes, *routed) if routed else None,
    )


def of_ranks(request: Request, world: World) -> Estimate:
    """The figures of the rank with the highest peak, and the peaks of all."""
    tracer = Tracer(request)
    found = tracer.ranks(world)
    trace = found.largest
    communicator = request.communicator_bytes
    routed = [] if not trace.peak_depends_on_data else [max(tracer.ranks(world, routing=r).peaks) for r in ONE_SIDED]
    figures = of_trace(request, trace)
    beside = figures.context_bytes + communicator
    return replace(
        figures,
        assumptions=(*figures.assumptions, *of_communication(request, world)),
        fits=(trace.reserved_bytes or max(found.peaks)) + beside <= request.device.memory_bytes,
        worst_peak_bytes=max(found.peaks + tuple(routed)) if routed else None,
        world_size=world.size,
        nodes=world.nodes,
        parallel=world.parallel,
        rank_peak_bytes=found.peaks,
        communicator_bytes=communicator,
    )


def of_trace(request: Request, trace: StepTrace) -> Estimate:
    """The assumptions of an estimate of one process's step, before it is known whether that fits."""
    return Estimate(
        step_figures=step_figures(trace),
        parameters=count_weights(request.model),
        precision=request.settings.precision,
        optimizer=request.optimizer_name,
        device=request.device.name,
        device_bytes=request.device.memory_bytes,
        assumptions=(
            *assumption_sentences(trace.assumptions),
            *of_outcomes(request, trace),
            *of_seconds(request.device),
        ),
        context_bytes=0 if request.role is None else CONTEXT_BYTES,
        fits=False,
        weights=dtypes_of(request.model),
        base_bytes=(base := frozen_base(request.model)).bytes,
        not_quantised=base.not_quantised,
        adapted=base.adapted,
    )


def of_outcomes(request: Request, trace: StepTrace) -> list[str]:
    """The assumption about numbers that the step reads and that decide what runs."""
    if not request.has_outcomes(trace):
        return []
    told = [] if request.refused_answers is None else [answers_refused(request.refused_answers)]
    which = "random numbers" if all(numbers.is_drawn for numbers in request.outcomes) else "numbers"
    return told if len(request.outcomes) < 2 else [*told, worst_outcome(which, len(request.outcomes))]


def worst_outcome(which: str, count: int) -> str:
    """The assumption about numbers that decide what runs."""
    return f"{which} that decide what runs were assumed to be those of the highest peak, of {count} outcomes"


def answers_refused(error: str) -> str:
    """The assumption where a step raises an error of this name with other answers than those that are named."""
    return f"with other answers to what it reads the step raises {error}, so these were assumed alone"


def of_seconds(device: DeviceSpec) -> list[str]:
    """The assumption about predicted seconds, where the device was not measured yet."""
    return (
        [f"predicted seconds follow {device.scaled_from}, until the device is measured"] if device.scaled_from else []
    )


def of_drive(request: Request, stream: Stream | None) -> list[str]:
    """The assumption about the drive from which weights stream to a card."""
    rate = None if stream is None or stream.folder is None else request.drive_bytes_per_second
    if rate is None:
        return []
    device = request.device
    whose = "measured past the file cache" if device.is_measured else "assumed; --host drive=RATE says another"
    if device.drive_bytes_per_second is not None:
        whose = "as --host says"
    return [f"the drive with the streamed weights is read at {rate / 1e9:.1f} GB/s ({whose})"]


def of_communication(request: Request, world: World) -> list[str]:
    """The assumptions about the messages between ranks."""
    if world.size == 1:
        return []
    sentences, communicator = [sentence(request.device, world)], request.communicator_bytes
    if communicator:
        sentences.append(f"the memory of NCCL's communicator was assumed to be {format_bytes(communicator)}")
    return sentences


def assumption_sentences(assumptions: Any) -> tuple[str, ...]:
    """The assumptions of a trace as sentences."""
    return tuple(
        f"{a.question} ({a.module or 'top level'}, {a.where}) was assumed {a.answer}"
        + ("; the peak depends on it" if a.moves_peak else "")
        for a in assumptions
    )
