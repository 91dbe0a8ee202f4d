"""A memory record as text for a terminal of a given width."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from tightfit.memory.pool import PoolStatistics
from tightfit.planner.records import TensorGroup
from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.planner.report.words import short
from tightfit.training.monitoring.recorded import RecordedFailure, RecordedTraining
from tightfit.units import format_bytes, format_count, format_seconds

MODULES = 8  # named in a table
TENSORS = 5


def describe_record(record: RecordedTraining, width: int = WIDTH) -> str:
    """The peak, its categories and its place, the phases, and resident memory."""
    parts: list[Table | str] = [*summary(record)]
    if record.failure is not None:
        parts += [failure_line(record.failure)]
    if sum(record.by_category.values()):
        parts += ["", category_table(record)]
    if record.by_module:
        parts += ["", module_table(record.by_module)]
    if record.traced is not None:
        parts += ["", tensor_table(record.traced.top)]
    if record.phase_peaks:
        parts += ["", phase_table(record)]
    if record.pools:
        parts += ["", pool_table(record.pools)]
    return rendered(*parts, width=width)


def summary(record: RecordedTraining) -> list[str]:
    """The monitored training and its peak, in sentences."""
    if not record.model:
        return ["No model was called with gradients: nothing was watched."]
    model = f"{record.model}, {format_count(record.parameters)} parameters"
    time = f", {format_seconds(record.step_seconds)} a step" if record.step_seconds else ""
    lines = [f"{model}, {record.optimizer or 'no optimizer'}, {record.device}; {record.steps} steps{time}"]
    lines.append(f"Peak {format_bytes(record.peak_bytes)} ({record.peak_bytes:,} bytes): {source_in_words(record)}.")
    if record.traced is not None:
        lines.append(f"In the traced step, the peak is in {place_in_words(record)}.")
    allocator = f"; of the device, {format_bytes(record.allocator['reserved_peak_bytes'])} were reserved at most" if (
        record.allocator
    ) else ""  # fmt: skip
    lines.append(f"Resident memory of the process: {format_bytes(record.rss_bytes)} at most{allocator}.")
    return lines


def source_in_words(record: RecordedTraining) -> str:
    """The source of the peak, in words."""
    if record.peak_source == "traced step":
        if record.failure is not None and record.failure.out_of_memory is not None:
            return f"step {record.traced_step}, up to the operator that failed, with the bytes that it requested"
        partly = "" if record.complete else ", which did not end"
        return f"step {record.traced_step}, recorded operator by operator{partly}"
    if record.peak_source == "CUDA allocator":
        return "the allocator's own"
    return "resident memory of the whole process, because no step was traced"


def place_in_words(record: RecordedTraining) -> str:
    """Phase, module and operator of the traced step's peak."""
    assert record.traced is not None, "there is a traced step"
    module = record.traced.peak_module or "top level"
    return f"{record.traced.peak_phase}, {module}, {short(record.traced.peak_operator)}"


def failure_line(failure: RecordedFailure) -> str:
    where = ", ".join(part for part in (failure.phase, failure.module, failure.operator) if part)
    return f"Ended by {failure.kind} in {where or 'the script'}: {failure.message}"


def category_table(record: RecordedTraining) -> Table:
    """Bytes by category: at the peak, or held between steps if no step was traced."""
    total = sum(record.by_category.values())
    table = table_of("at the peak" if record.traced is not None else "held", "bytes", "share")
    for category, size in record.by_category.items():
        table.add_row(category, format_bytes(size), f"{size / total:.1%}")
    return table


def module_table(by_module: Mapping[str, int]) -> Table:
    """The modules with the most bytes at the peak."""
    table = table_of("modules at the peak", "bytes", "share")
    total = sum(by_module.values())
    items = sorted(by_module.items(), key=lambda item: -item[1])
    for path, size in items[:MODULES]:
        table.add_row(path or "top level", format_bytes(size), f"{size / total:.1%}")
    rest = sum(size for _, size in items[MODULES:])
    if rest:
        table.add_row(f"{len(items) - MODULES} others", format_bytes(rest), f"{rest / total:.1%}")
    return table


def tensor_table(groups: Sequence[TensorGroup]) -> Table:
    """The largest tensors at the peak. Tensors that differ only in a block's number share a line."""
    table = table_of("largest tensors", "bytes", "what", "made by", texts=("what", "made by"))
    for group in groups[:TENSORS]:
        what = f"{group.category} {'x'.join(map(str, group.shape))} {group.dtype}".strip()
        times = f" ×{group.count}" if group.count > 1 else ""
        table.add_row((group.name or "top level") + times, format_bytes(group.bytes), what, short(group.operator))
    return table


def phase_table(record: RecordedTraining) -> Table:
    """The highest point of each phase, and resident memory."""
    table = table_of("phase", "highest", "resident")
    for phase in dict.fromkeys([*record.phase_peaks, *record.rss_by_phase]):
        peak, rss = record.phase_peaks.get(phase), record.rss_by_phase.get(phase)
        table.add_row(phase, format_bytes(peak) if peak else "", format_bytes(rss) if rss else "")
    return table


def pool_table(pools: Mapping[str, PoolStatistics]) -> Table:
    """Buffer pools: their highest size, and the numbers of hits (reused), misses (made) and refusals (no room)."""
    table = table_of("pool", "highest", "now", "in use", "buffers", "hits", "misses", "refused")
    for name, pool in pools.items():
        sizes = (pool.high_water_bytes, pool.held_bytes, pool.leased_bytes)
        counts = (pool.buffers, pool.hits, pool.misses, pool.refusals)
        table.add_row(name, *map(format_bytes, sizes), *(f"{count:,}" for count in counts))
    return table
