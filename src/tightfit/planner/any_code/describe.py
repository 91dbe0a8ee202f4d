"""Predictions for code as text for a terminal."""

from tightfit.planner.any_code.records import CodeRecord, GenerationRecord
from tightfit.planner.report.plan_tables import notes, peak_table, phase_table
from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.planner.report.words import arithmetic, short, where
from tightfit.units import format_bytes, format_count, format_seconds


def describe_code(found: CodeRecord, width: int = WIDTH) -> str:
    """The peak, its categories and its place, and the time."""
    figures, peak = found.figures, found.figures.peak_bytes
    modules = f"{', '.join(found.modules)} with {format_count(found.parameters)} parameters, " if found.modules else ""
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


def describe_generation(found: GenerationRecord, width: int = WIDTH) -> str:
    """The peak and what it is made of, and the time of prefill and of a token."""
    peak, figures = found.peak_bytes, found.figures
    texts = "1 text" if found.batch_size == 1 else f"{found.batch_size} texts"
    lines = [
        f"{format_count(found.parameters)} parameters, {arithmetic(found.weights, found.precision)}, {found.device}"
        f"{'' if found.fits else ': does not fit'}",
        f"Inference: {texts} of {found.prompt_tokens} tokens, {found.new_tokens} new tokens each; the prompt is read "
        f"{found.chunk_size} tokens at a time.",
        f"Peak {format_bytes(peak)} ({peak:,} bytes), {peak / found.device_bytes:.1%} of the device, in "
        f"{found.peak_phase} ({figures.peak_module or 'top level'}, {short(figures.peak_operator)}).",
    ]
    if figures.reserved_bytes is not None:
        lines.append(
            f"The allocator reserves {format_bytes(figures.reserved_bytes)}; {format_bytes(found.context_bytes)} more "
            "are assumed for the context."
        )
    at_peak = table_of("at the peak", "bytes", "share")
    for category, size in found.by_category.items():
        at_peak.add_row(category, format_bytes(size), f"{size / peak:.1%}")
    phases = table_of("phase", "highest", "time")
    phases.add_row("prefill", format_bytes(found.prefill_peak_bytes), format_seconds(found.prefill_seconds))
    if found.decode_peak_bytes is not None:
        phases.add_row("decode", format_bytes(found.decode_peak_bytes), format_seconds(found.decode_seconds))
    speed = [f"Seconds are {found.seconds_from}."]
    if found.tokens_per_second is not None and found.first_token_seconds and found.last_token_seconds:
        speed.insert(
            0,
            f"Decode: {found.tokens_per_second:,.1f} tokens a second ({texts} together); a step takes "
            f"{format_seconds(found.first_token_seconds)} at the beginning and "
            f"{format_seconds(found.last_token_seconds)} at the end.",
        )
    held = f"Keys and values take {format_bytes(found.cache_bytes)} after the last token."
    return rendered(*lines, held, "", at_peak, "", phases, "", *speed, *notes(found.assumptions), width=width)
