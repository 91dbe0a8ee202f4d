"""Plans and estimates as text for a terminal of a given width."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from tightfit.devices.known import find
from tightfit.planner.outcome import CurveRecord, EstimateRecord, PlanRecord
from tightfit.planner.records import BlockChoice, CurvePoint, StepFigures
from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.planner.report.words import alike, arithmetic, keeps, kept_bytes, where, without_folders
from tightfit.ranks.world import IN_WORDS
from tightfit.units import format_bytes, format_count, format_seconds

# Estimates


def describe_estimate(estimate: EstimateRecord, width: int = WIDTH) -> str:
    """The peak, its categories and its place, and the time."""
    step_figures = estimate.step_figures
    return rendered(
        f"{format_count(estimate.parameters)} parameters, {arithmetic(estimate.weights, estimate.precision)}, "
        f"{estimate.optimizer}, {estimate.device}{does_not_fit(estimate)}",
        *frozen(estimate),
        f"Peak {format_bytes(step_figures.peak_bytes)} ({step_figures.peak_bytes:,} bytes), "
        f"{step_figures.peak_bytes / estimate.device_bytes:.1%} of the device; "
        f"step {format_seconds(step_figures.step_seconds)}.",
        *device_footprint(estimate),
        *host_sentence(estimate),
        *ranks(estimate),
        f"The peak is in {where(step_figures)}.",
        *worst_case(step_figures.peak_bytes, estimate.worst_peak_bytes),
        "",
        peak_table(step_figures),
        "",
        phase_table(step_figures),
        *notes(estimate.assumptions),
        width=width,
    )


NAMED = 3  # weights that a base in few bits does not reach


def frozen(estimate: EstimateRecord) -> list[str]:
    """Sentences about the layers that have adapters and about weights that a base in few bits does not reach."""
    lines = [f"Adapters are on {', '.join(estimate.adapted)}."] if estimate.adapted else []
    beside = estimate.not_quantised
    if beside:
        named = [f"{name} {format_bytes(count)}" for name, count in [*beside.items()][:NAMED]]
        named += [f"{len(beside) - NAMED} more"] if len(beside) > NAMED else []
        lines.append(
            f"Frozen weights take {format_bytes(estimate.base_bytes)}; {format_bytes(sum(beside.values()))} of them "
            f"are not in few bits: {', '.join(named)}."
        )
    return lines


def does_not_fit(estimate: EstimateRecord) -> str:
    """A clause that the step without levers is too large for the device; empty if it fits."""
    if estimate.fits:
        return ""
    return f": does not fit, {format_bytes(estimate.taken_bytes)} of {format_bytes(estimate.device_bytes)}"


def device_footprint(estimate: EstimateRecord) -> list[str]:
    """A sentence about a CUDA device's memory besides the tensors."""
    if estimate.reserved_bytes is None:
        return []
    reserved = estimate.taken_bytes - estimate.context_bytes
    return [
        f"The allocator reserves {format_bytes(reserved)}; with {format_bytes(estimate.context_bytes)} "
        f"assumed for the context that is {format_bytes(estimate.taken_bytes)} of "
        f"{format_bytes(estimate.device_bytes)}."
    ]


def host_sentence(found: EstimateRecord | PlanRecord) -> list[str]:
    """A sentence about the host's memory; none in plans of earlier versions."""
    if not found.host.process:
        return []
    held = sorted(found.host_by_category.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in held if size >= found.host_peak_bytes / 100)
    return [f"Host memory {format_bytes(found.host_peak_bytes)} ({found.host_peak_bytes:,} bytes): {parts}."]


def ranks(estimate: EstimateRecord | PlanRecord) -> list[str]:
    """Sentences about the ranks of a training on several devices."""
    peaks = estimate.rank_peak_bytes
    if not peaks:
        return []
    nodes = "" if estimate.nodes == 1 else f" on {estimate.nodes} nodes"
    engine = IN_WORDS[estimate.parallel or "ddp"]
    least = min(peaks)
    differ = "all ranks have this peak" if least == max(peaks) else f"the rank with the least has {format_bytes(least)}"
    lines = [f"Each of {estimate.world_size} ranks{nodes}, with {engine}; {differ}."]
    if estimate.communicator_bytes:
        lines.append(f"NCCL takes {format_bytes(estimate.communicator_bytes)} besides, which is assumed.")
    return lines


def resharding(plan: PlanRecord) -> list[str]:
    """A sentence about FSDP2's gathered weights."""
    if plan.reshard_after_forward is None:
        return []
    keeps = "free their gathered weights after forward" if plan.reshard_after_forward else "keep gathered weights"
    apart = [f"{' and '.join(plan.sharded_apart)} are sharded by themselves."] if plan.sharded_apart else []
    once = ["Gradients are exchanged in the last micro-batch only."] if plan.reduces_once else []
    held = f"Shards, gradients and states are on the host ({format_bytes(plan.host_bytes)} a rank), which updates them."
    return [
        f"Blocks {keeps} (reshard_after_forward={plan.reshard_after_forward}).",
        *apart,
        *once,
        *([held] if plan.shards_on_host else []),
        f"All ranks share plan {plan.hash}.",
    ]


def worst_case(peak: int, worst: int | None) -> list[str]:
    """A sentence about the worst peak, if it depends on how tokens are routed to experts."""
    if worst is None:
        return []
    more = f"{format_bytes(worst)} ({worst:,} bytes)" if worst != peak else "the same"
    return [f"It depends on the data: experts are assumed evenly used; with all tokens at the fewest, it is {more}."]


def peak_table(step_figures: StepFigures) -> Table:
    """Bytes at the peak by category."""
    table = table_of("at the peak", "bytes", "share")
    for category, size in step_figures.by_category.items():
        table.add_row(category, format_bytes(size), f"{size / step_figures.peak_bytes:.1%}")
    return table


def phase_table(step_figures: StepFigures) -> Table:
    """The highest point and the seconds of each phase that occurs."""
    table = table_of("phase", "highest", "time")
    for phase, peak in step_figures.phase_peaks.items():
        if peak:
            table.add_row(phase, format_bytes(peak), format_seconds(step_figures.seconds_by_phase[phase]))
    return table


# Plans


def describe_plan(plan: PlanRecord, width: int = WIDTH) -> str:
    """A report of a plan: whether the step fits, plain against planned, the choices of blocks, and rejected levers with
    reasons.
    """
    parts: list[Table | str] = [*summary(plan), "", comparison(plan)]
    if any(choice.action != "keep" for choice in plan.choices):
        parts += ["", block_table(plan.choices)]
    if plan.curve is not None:
        parts += ["", *curve_tables(plan.curve, plan.peak_bytes)]
    if plan.rejected:
        parts += ["", rejected_table(plan)]
    return rendered(*parts, *notes(plan.assumptions), width=width)


def summary(plan: PlanRecord) -> list[str]:
    """The plan in sentences."""
    step = plan.step_seconds / plan.plain.step_seconds if plan.plain.step_seconds else 1.0
    lines = [
        f"{arithmetic(plan.weights, plan.precision)}, {plan.optimizer}, {plan.device}; batch {plan.batch}",
        f"Fits: {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}, "
        f"with {step:.2f}x the time of the plain step.",
        *device_room(plan),
        *host_sentence(plan),
        *ranks(plan),
        *resharding(plan),
    ]
    if not used_levers(plan):
        lines.append("No lever is needed.")
    return lines + used_levers(plan)


def device_room(plan: PlanRecord) -> list[str]:
    """Sentences about the memory that a plan uses of a CUDA device, and about what its budget limits."""
    room = plan.room
    if room is None:
        return []
    whole = (
        f"With what the allocator reserves and {format_bytes(room.context_bytes)} assumed for the context, the step "
        f"takes {format_bytes(room.taken_bytes)} of the {format_bytes(room.device_bytes)} of the device"
    )
    if room.is_bounded:
        return [f"{whole}; the budget limits all of that."]
    lines = [f"{whole}: a budget in bytes limits the tensors alone (max_memory_allocated)."]
    if room.taken_bytes > plan.budget_bytes:
        size, known = format_bytes(plan.budget_bytes).replace(" ", ""), find(plan.device)
        name = "NAME" if known is None else known.key
        lines.append(f"For a device that holds {size} in all: device {name},memory={size}, and a budget of 100%.")
    return lines


def used_levers(plan: PlanRecord) -> list[str]:
    """One sentence for each lever of the plan."""
    return [lever.sentence(plan.choices) for lever in plan.levers]


def comparison(plan: PlanRecord) -> Table:
    """The plain step beside the planned one."""
    table = table_of("", "plain", "planned", "of plain")
    plain, planned = plan.plain, plan.planned

    def row(name: str, before: float, after: float, form: Callable[[Any], str]) -> None:
        table.add_row(name, form(before), form(after), f"{after / before:.0%}" if before else "")

    row("peak", plain.peak_bytes, planned.peak_bytes, format_bytes)
    if plain.reserved_bytes is not None and planned.reserved_bytes is not None:
        # What the planned step takes is said above: near the device's limit the allocator returns free segments.
        held = planned.reserved_bytes if plan.room is None else plan.room.taken_bytes - plan.room.context_bytes
        row("reserved", plain.reserved_bytes if plan.levers else held, held, format_bytes)
    row("step", plain.step_seconds, planned.step_seconds, format_seconds)
    table.add_section()
    table.add_row("at the peak")
    for category in plain.by_category:
        row(f"  {category}", plain.by_category[category], planned.by_category[category], format_bytes)
    table.add_row("  in", plain.peak_phase, planned.peak_phase)
    table.add_row("  at", plain.peak_module or "top level", planned.peak_module or "top level")
    return table


def block_table(choices: Sequence[BlockChoice]) -> Table:
    """The choices of blocks. Neighbouring blocks with the same choice share a line. A long path that all blocks begin
    with stands above them once.
    """
    places = [choice.path.split(".")[:-2] for choice in choices]
    shared = [names[0] for names in zip(*places, strict=False) if len(set(names)) == 1]
    within = f"{'.'.join(shared)}." if len(shared) > 1 and all(each[: len(shared)] == shared for each in places) else ""
    head = f"blocks of\n{within.removesuffix('.')}" if within else "blocks"
    table = table_of(head, "keep for backward", "kept", "recompute", texts=("keep for backward",))
    for name, same in alike(choices):
        seconds = sum(choice.recompute_seconds for choice in same)
        table.add_row(
            name.replace(within, ""), keeps(same[0]), kept_bytes(same), format_seconds(seconds) if seconds else ""
        )
    return table


def rejected_table(plan: PlanRecord) -> Table:
    """Rejected levers, with reasons."""
    table = table_of("not taken", "peak", "step", "because", texts=("because",))
    for rejected in plan.rejected:
        peak = "" if rejected.peak_bytes is None else format_bytes(rejected.peak_bytes)
        step = "" if rejected.step_seconds is None else format_seconds(rejected.step_seconds)
        table.add_row(rejected.levers, peak, step, rejected.reason)
    return table


# Curves


def describe_curve(curve: CurveRecord) -> str:
    """The points of the curve, and the recipes."""
    return rendered(*curve_tables(curve))


def curve_tables(curve: CurveRecord, chosen_bytes: int | None = None) -> list[Table | str]:
    """Peak against step time, from the plain step down. The plan's own point is marked."""
    plain = curve.recipes[0]
    table = table_of("trade-off curve", "peak", "of plain", "step", "of plain")
    for point in curve.points:
        mark = " (this plan)" if point.peak_bytes == chosen_bytes else ""
        table.add_row(point.levers + mark, *_against(point, plain))
    recipes = table_of("fixed recipes", "peak", "of plain", "step", "of plain")
    for point in curve.recipes:
        recipes.add_row(point.levers, *_against(point, plain))
    return [table, "", recipes]


def _against(point: CurvePoint, plain: CurvePoint) -> tuple[str, ...]:
    step = f"{point.step_seconds / plain.step_seconds:.1%}" if plain.step_seconds else ""
    share = f"{point.peak_bytes / plain.peak_bytes:.1%}"
    return format_bytes(point.peak_bytes), share, format_seconds(point.step_seconds), step


# Both


def notes(assumptions: Sequence[str]) -> list[str]:
    """The assumptions as lines. Files have no folders."""
    lines = without_folders(assumptions)
    return ["", *(f"Note: {line}." for line in lines)] if lines else []
