"""Diagnoses each kind of subject without a new dry run: one `Diagnosis` without remedies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightfit.memory.failure import OutOfMemory, find_in_log
from tightfit.memory.frames import Frame, frames_in_log, is_loading, phase_in_log, users_frame
from tightfit.memory.snapshot import Snapshot
from tightfit.planner.plans import Plan
from tightfit.planner.records import StepFigures
from tightfit.planner.report.words import short
from tightfit.recipes.doctor.describe import Diagnosis
from tightfit.recipes.doctor.general import KINDS, general_remedies
from tightfit.recipes.doctor.records import Holder
from tightfit.training.monitoring.record import Record
from tightfit.training.monitoring.where import PlaceInStep
from tightfit.units import format_bytes

HOLDERS = 8
_LESS_ON_THE_HOST = (
    "fewer DataLoader workers, smaller prefetch, data that is mapped and not read, and one process at a time that "
    "loads weights."
)
HOST = f"The memory of the host ran out, not a card's: {_LESS_ON_THE_HOST}"
KILLED = (
    "Where nobody sent the signal, Linux did: the memory of the host ran out, not a card's (`sudo dmesg | tail` says "
    f"so). Then: {_LESS_ON_THE_HOST}"
)
OTHER_DEVICE = (
    "tightfit predicts and trains on CPUs and CUDA devices, not on {0}. On any device less memory is taken by smaller "
    "batches, shorter sequences, PyTorch's own checkpoint (torch.utils.checkpoint) and, where it computes in bf16, "
    'torch.autocast("{0}", torch.bfloat16).'
)
_SAYS_MEMORY = re.compile(r"oom|out of memory|DataLoader worker", re.IGNORECASE)
EXPANDABLE = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, before Python starts"


@dataclass(frozen=True)
class LoggedFailure:
    """An out-of-memory error found in a text."""

    name: str
    out_of_memory: OutOfMemory
    frames: tuple[Frame, ...]  # of the traceback above it, innermost first

    @classmethod
    def of(cls, name: str, text: str) -> "LoggedFailure | None":
        """The last one in a text; None where there is none."""
        found = find_in_log(text)
        return None if found is None else cls(name, found[1], tuple(frames_in_log(text, found[0])))


def of_step(subject: str, step_figures: StepFigures, by_module: Mapping[str, int] | None = None) -> Diagnosis:
    """The diagnosis of a traced or predicted step."""
    category = max(step_figures.by_category, key=step_figures.by_category.__getitem__)
    size = step_figures.by_category[category]
    module = step_figures.peak_module
    findings = (
        f"The peak of {format_bytes(step_figures.peak_bytes)} is in {step_figures.peak_phase}, "
        f"{module or 'top level'}, {short(step_figures.peak_operator)}.",
        f"Most of it is {category}: {format_bytes(size)}, {size / step_figures.peak_bytes:.0%}.",
    )
    holders = by_module if by_module else {_group(g.name, g.count, g.category): g.bytes for g in step_figures.top}
    return Diagnosis(
        subject=subject,
        findings=findings,
        phase=step_figures.peak_phase,
        module=module,
        operator=step_figures.peak_operator,
        category=category,
        peak_bytes=step_figures.peak_bytes,
        by_category=step_figures.by_category,
        holders=_largest(holders),
    )


def of_plan(plan: Plan) -> Diagnosis:
    found = of_step("a plan", plan.planned)
    saved = plan.plain_peak_bytes - plan.peak_bytes
    against = (
        f"The plain step takes {format_bytes(plan.plain_peak_bytes)}: the plan saves {format_bytes(saved)}, and is "
        f"within its budget of {format_bytes(plan.budget_bytes)}."
    )
    return replace(found, findings=(*found.findings, against), limit_bytes=plan.budget_bytes)


def of_record(record: Record) -> Diagnosis:
    """The diagnosis of a monitored training, or of its failure if memory ran out."""
    name = f"a record of {record.steps} steps of {record.model or 'a script without a model'}"
    found = Diagnosis(name, ())
    if record.traced is not None:
        found = of_step(name, record.traced, record.by_module)
    elif record.phase_peaks:
        highest = (
            f"The highest memory is in {record.peak_phase}: {format_bytes(record.peak_bytes)} ({record.peak_source})."
        )
        found = Diagnosis(name, (highest,), phase=record.peak_phase, peak_bytes=record.peak_bytes)
    failure = record.failure
    if failure is not None and failure.out_of_memory is not None:
        place = PlaceInStep(failure.phase, failure.module, failure.operator)
        said = of_error(failure.out_of_memory, place)
        if record.traced is not None and record.complete:
            before = f"Step {record.traced_step}, which was traced before, reached {format_bytes(record.peak_bytes)}."
            return replace(said, subject=name, findings=(*said.findings, before), by_category=found.by_category,
                         holders=found.holders, category=found.category)  # fmt: skip
        return replace(found, findings=(*said.findings, *found.findings), requested_bytes=said.requested_bytes,
                     limit_bytes=said.limit_bytes, phase=said.phase or found.phase, advice=said.advice,
                     module=said.module or found.module, fragmentation_bytes=said.fragmentation_bytes)  # fmt: skip
    if failure is not None:
        ended = f"The training ended by {failure.kind}, which is no out-of-memory error: {failure.message}"
        found = replace(found, findings=(*found.findings, ended))
    if record.allocator is not None:
        idle = record.allocator["reserved_peak_bytes"] - record.allocator["allocated_peak_bytes"]
        line = f"The allocator reserved {format_bytes(idle)} more than tensors used at their peak."
        found = replace(found, findings=(*found.findings, line), fragmentation_bytes=idle)
    return found


def of_error(said: OutOfMemory, place: PlaceInStep, subject: str | None = None) -> Diagnosis:
    """The diagnosis of an out-of-memory error: the allocator's figures, and the place where it was raised."""
    requested = "" if said.requested_bytes is None else f": {format_bytes(said.requested_bytes)} were requested"
    findings = [f"{said.device} ran out of memory{requested}{_in(place)}."]
    if said.requested_bytes is None:
        findings.append(f"The message has no figures: {said.message}")
    if said.capacity_bytes is not None and said.free_bytes is not None:
        findings.append(
            f"Of {format_bytes(said.capacity_bytes)} on the device, {format_bytes(said.free_bytes)} were free."
        )
    if said.limit_bytes is not None:
        findings.append(f"PyTorch was allowed {format_bytes(said.limit_bytes)}.")
    if said.allocated_bytes is not None:
        findings.append(f"Tensors held {format_bytes(said.allocated_bytes)}.")
    findings += _others(said)
    advice: list[str] = []
    is_of_host = said.device == "cpu" and said.requested_bytes is None  # the system has ended a process
    if is_of_host:
        if not _SAYS_MEMORY.search(said.message):
            findings[0] = "SIGKILL ended a process."
        advice.append(HOST if _SAYS_MEMORY.search(said.message) else KILLED)
    if said.device.partition(":")[0] not in KINDS:
        advice.append(OTHER_DEVICE.format(said.device))
    if said.unallocated_bytes is not None:
        findings.append(f"{format_bytes(said.unallocated_bytes)} were reserved by PyTorch and not in use.")
        if said.missing_bytes == 0:
            findings.append("The free and idle bytes would have been enough in one piece: this is fragmentation.")
            advice.append(f"Against fragmentation: {EXPANDABLE}.")
        elif said.missing_bytes is not None:
            findings.append(f"At least {format_bytes(said.missing_bytes)} were missing.")
    return Diagnosis(
        subject=subject or f"an out-of-memory error on {said.device}",
        findings=tuple(findings),
        phase=place.phase,
        module=place.module,
        operator=place.operator,
        requested_bytes=said.requested_bytes,
        limit_bytes=available(said),
        fragmentation_bytes=said.unallocated_bytes,
        remedies=() if is_of_host else general_remedies(said.device, place.phase, available(said)),
        advice=tuple(advice),
    )


def _others(said: OutOfMemory) -> list[str]:
    """A sentence about the memory that other processes hold on the device."""
    if said.capacity_bytes is None or said.free_bytes is None or said.process_bytes is None:
        return []
    others = said.capacity_bytes - said.free_bytes - said.process_bytes
    return [f"Other processes held {format_bytes(others)}."] if others > 0 else []


def available(said: OutOfMemory) -> int | None:
    """The bytes available for tensors: allocated, idle and free ones together, at most the user's limit."""
    if said.allocated_bytes is None or said.free_bytes is None:
        return None
    # Idle bytes count as available: the allocator returns free segments before it raises.
    total = said.allocated_bytes + (said.unallocated_bytes or 0) + said.free_bytes
    return total if said.limit_bytes is None else min(total, said.limit_bytes)


def of_log(logged: LoggedFailure) -> Diagnosis:
    """The diagnosis of an error in a text, with the traceback before it."""
    frame = users_frame(logged.frames)
    place = PlaceInStep(phase_in_log(logged.frames), None)
    found = of_error(logged.out_of_memory, place, f"an out-of-memory error in {logged.name}")
    if is_loading(logged.frames):
        found = replace(
            found,
            findings=(*found.findings, "Weights were being loaded or moved to the device: no step had begun."),
            remedies=general_remedies(logged.out_of_memory.device, None, found.limit_bytes, loading=True)
            if found.remedies
            else (),
        )
    if frame is None:
        return found
    return replace(found, findings=(*found.findings, f"Its traceback ends at {frame}."))


def of_snapshot(snapshot: Snapshot) -> Diagnosis:
    """The diagnosis of a CUDA memory snapshot."""
    phase = max(snapshot.phases, key=snapshot.phases.__getitem__, default=None)
    findings = [
        f"{format_bytes(snapshot.reserved_bytes)} reserved in {snapshot.segments} segments; "
        f"{format_bytes(snapshot.allocated_bytes)} in use.",
        f"{format_bytes(snapshot.inactive_bytes)} idle, of which {format_bytes(snapshot.inactive_split_bytes)} in "
        f"segments that are partly in use; the largest free block has {format_bytes(snapshot.largest_free_bytes)}.",
    ]
    advice: list[str] = []
    if snapshot.events:
        findings.append(
            f"The highest point of {snapshot.events:,} recorded events: {format_bytes(snapshot.peak_bytes)}."
        )
    else:
        findings.append("No history was recorded: these are figures of the moment of the snapshot, not of the peak.")
        advice.append("Record a history: torch.cuda.memory._record_memory_history() before the training.")
    for refused in snapshot.refused[-1:]:
        free = "" if refused.free_bytes is None else f", with {format_bytes(refused.free_bytes)} free on the device"
        findings.append(f"{format_bytes(refused.requested_bytes)} were refused at {refused.where}{free}.")
        if refused.requested_bytes <= snapshot.inactive_bytes + (refused.free_bytes or 0):
            findings.append("The free and idle bytes would have been enough in one piece: this is fragmentation.")
            advice.append(f"Against fragmentation: {EXPANDABLE}.")
    last = snapshot.refused[-1] if snapshot.refused else None
    return Diagnosis(
        subject="a CUDA memory snapshot",
        findings=tuple(findings),
        phase=last.phase if last is not None else phase if phase != "not recorded" else None,
        peak_bytes=snapshot.peak_bytes,
        requested_bytes=None if last is None else last.requested_bytes,
        limit_bytes=None if last is None else snapshot.reserved_bytes + (last.free_bytes or 0),
        fragmentation_bytes=snapshot.inactive_split_bytes,
        by_category={f"allocated in {name}": size for name, size in snapshot.phases.items()},
        holders=tuple(Holder(_group(h.where, h.count, h.phase or ""), h.bytes) for h in snapshot.holders[:HOLDERS]),
        advice=tuple(advice),
    )


def _in(place: PlaceInStep) -> str:
    parts = [part for part in (place.phase, place.module, short(place.operator) if place.operator else None) if part]
    return f", in {', '.join(parts)}" if parts else ""


def _group(name: str, count: int, kind: str) -> str:
    times = f" ×{count}" if count > 1 else ""
    return f"{name or 'top level'}{times}" + (f" ({kind})" if kind else "")


def _largest(sizes: Mapping[str, int]) -> tuple[Holder, ...]:
    items = sorted(sizes.items(), key=lambda item: -item[1])
    return tuple(Holder(name or "top level", size) for name, size in items[:HOLDERS])
