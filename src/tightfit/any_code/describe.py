"""Predictions for code as text for a terminal."""

from tightfit.any_code.records import CodeRecord
from tightfit.report.plan_tables import notes, peak_table, phase_table
from tightfit.report.terminal import WIDTH, rendered
from tightfit.report.words import where
from tightfit.units import format_bytes, format_seconds


def describe_code(found: CodeRecord, width: int = WIDTH) -> str:
    """The peak, its categories and its place, and the time."""
    figures, peak = found.figures, found.figures.peak_bytes
    modules = f"{', '.join(found.modules)} with {found.parameters / 1e6:.1f}M parameters, " if found.modules else ""
    lines = [
        f"{found.name}: {modules}{found.device}{'' if found.fits else ': does not fit'}",
        f"Peak {format_bytes(peak)} ({peak:,} bytes), {peak / found.device_bytes:.1%} of the device; "
        f"it takes {format_seconds(figures.step_seconds)} (predicted).",
    ]
    if figures.reserved_bytes is not None:
        lines.append(
            f"The allocator reserves {format_bytes(figures.reserved_bytes)}; {format_bytes(found.context_bytes)} more "
            "are assumed for the context."
        )
    lines.append(f"The peak is in {where(figures)}.")
    tables = ["", peak_table(figures), "", phase_table(figures)]
    return rendered(*lines, *tables, *notes(found.assumptions), width=width)
