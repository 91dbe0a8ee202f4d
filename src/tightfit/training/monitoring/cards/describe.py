"""The memory that a command took of cards that are not there, as text for a terminal and as a page."""

import html
import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.training.monitoring.cards.records import CardRunRecord, RankOfRun
from tightfit.units import format_bytes

MOST = 8  # rows of a table
NO_MODULE = "outside of forward"
NO_LINE = "none: backward, libraries"
READ = 6  # lines that read numbers


def describe_run(run: CardRunRecord, width: int = WIDTH) -> str:
    """A text that says whether it fits, the peak and its parts, the steps, the ranks."""
    parts: list[Table | str] = [*verdict(run)]
    highest = run.highest
    if highest is not None and highest.steps:
        parts += ["", step_table(highest)]
    if len(run.ranks) > 1:
        parts += ["", rank_table(run)]
    if highest is not None:
        shares = (("at the peak", highest.by_category), ("modules at the peak", _named(highest.by_module, NO_MODULE)))
        for title, found in (*shares, ("lines at the peak", _named(highest.by_line, NO_LINE))):
            if found:
                parts += ["", share_table(title, found)]
    parts += ["", *_read_lines(run)] if run.read_values else []
    return rendered(*parts, "", *closing(run), width=width)


def verdict(run: CardRunRecord) -> list[str]:
    """The card, whether the command fits, and the peak."""
    several = f"{run.count} of them, each with " if run.count > 1 else ""
    which = f"the {run.device} of this machine" if run.here else f"a {run.device} that is not here"
    lines = [
        f"{shlex.join(run.command)}",
        f"on {which}: {several}{format_bytes(run.memory_bytes)}, of which CUDA itself takes "
        f"{format_bytes(run.context_bytes)} (assumed).",
        "",
    ]
    refused = run.out_of_memory
    if refused is not None:
        when = f"in step {refused.step}, {refused.phase}" if refused.step else refused.phase
        where = f", at {refused.at}" if refused.at else ""
        lines.append(f"Does not fit: {when}{where}, {format_bytes(refused.asked_bytes)} more were asked for.")
    elif run.fits:
        lines.append(
            f"Fits: {format_bytes(run.reserved_bytes)} reserved at most, {format_bytes(max(0, run.free_bytes))} of the "
            "card are left."
        )
    else:
        lines.append("Not known whether it fits.")
    if run.peak_bytes:
        lines.append(f"Peak {format_bytes(run.peak_bytes)} ({run.peak_bytes:,} bytes) allocated{_peak_place(run)}.")
        host = f"Host memory: {format_bytes(run.host_peak_bytes)} at most"
        lines.append(f"{host}, of the process with the most.")
    return [*lines, *run.notes]


def _peak_place(run: CardRunRecord) -> str:
    highest = run.highest
    for number, step in enumerate(highest.steps if highest else (), 1):
        if step.peak_bytes == run.peak_bytes:
            return f", in step {number}, {step.phase}" + (f", at {step.at}" if step.at else "")
    return ", before the first step" if highest and not run.out_of_memory and highest.steps else ""


def closing(run: CardRunRecord) -> list[str]:
    """How far the figures go."""
    stopped = any(rank.stopped for rank in run.ranks)
    ended = "Ended after these steps; --steps 0 runs to the command's own end. " if stopped else ""
    if run.here:
        return [f"{ended}Measured with PyTorch's own CUDA allocator on the card of this machine."]
    numbers = "Numbers were true." if run.values else "Kernels were not run: bytes and integers are true."
    return [f"{ended}{numbers} Measured with PyTorch's own CUDA allocator on a runtime that computes nothing."]


def step_table(rank: RankOfRun) -> Table:
    table = table_of("step", "allocated", "reserved", "highest in", "at", texts=("highest in", "at"))
    steps = list(enumerate(rank.steps, 1))
    for number, step in steps if len(steps) <= MOST else [*steps[: MOST - 1], steps[-1]]:
        table.add_row(
            str(number), format_bytes(step.peak_bytes), format_bytes(step.reserved_bytes), step.phase, step.at
        )
    return table


def rank_table(run: CardRunRecord) -> Table:
    table = table_of("rank", "allocated", "reserved", "host", "steps")
    for rank in run.ranks:
        sizes = (rank.peak_bytes, rank.reserved_bytes, rank.host_peak_bytes)
        table.add_row(f"{rank.rank}, card {rank.card}", *map(format_bytes, sizes), str(len(rank.steps)))
    return table


def share_table(title: str, shares: Mapping[str, int]) -> Table:
    table = table_of(title, "bytes", "share")
    total = sum(shares.values())
    items = list(shares.items())
    for name, size in items[:MOST]:
        table.add_row(name, format_bytes(size), f"{size / total:.1%}")
    rest = sum(size for _, size in items[MOST:])
    if rest:
        table.add_row(f"{len(items) - MOST} others", format_bytes(rest), f"{rest / total:.1%}")
    return table


def _named(shares: Mapping[str, int], otherwise: str) -> dict[str, int]:
    """Shares without a name under one that says why; none where no share has a name."""
    return {name or otherwise: size for name, size in shares.items()} if any(shares) else {}


def _read_lines(run: CardRunRecord) -> list[str]:
    lines = ["These lines read numbers from the card, which were not true (--values computes them):"]
    for value in run.read_values[:READ]:
        code = f"  {value.line}" if value.line else ""
        lines.append(f"  {value.at}{code}" + (f"  ({value.count} times)" if value.count > 1 else ""))
    more = len(run.read_values) - READ
    return [*lines, f"  and {more} others"] if more > 0 else lines


# The page


def write_page(run: CardRunRecord, target: Path) -> None:
    """The same as one HTML file that needs nothing else."""
    highest = run.highest
    sections = []
    if highest is not None:
        steps = [
            (str(n), format_bytes(s.peak_bytes), format_bytes(s.reserved_bytes), s.phase, s.at)
            for n, s in enumerate(highest.steps, 1)
        ]
        if steps:
            sections.append(_html_table(("step", "allocated", "reserved", "highest in", "at"), steps))
        if highest.curve:
            sections.append(_drawn(highest.curve, run.memory_bytes - run.context_bytes))
        found = (("at the peak", highest.by_category), ("modules", _named(highest.by_module, NO_MODULE)))
        for title, shares in (*found, ("lines", _named(highest.by_line, NO_LINE))):
            total = sum(shares.values()) or 1
            rows = [(name, format_bytes(size), f"{size / total:.1%}") for name, size in shares.items()]
            sections.append(_html_table((title, "bytes", "share"), rows) if rows else "")
    said = "".join(f"<p>{html.escape(line)}</p>" for line in verdict(run) if line)
    read = "".join(f"<p>{html.escape(line)}</p>" for line in (_read_lines(run) if run.read_values else []))
    end = "".join(f"<p><small>{html.escape(line)}</small></p>" for line in closing(run))
    target.write_text(_PAGE.format(title=html.escape(run.device), body=said + "".join(sections) + read + end), "utf-8")


_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>tightfit run: {title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #8884; white-space: nowrap; }}
svg {{ width: 100%; height: auto; }}
</style></head><body>{body}</body></html>
"""


def _html_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _drawn(curve: tuple[int, ...], limit: int) -> str:
    """The bytes in use over the process's allocations, under the card's own limit where it is near."""
    width, height, top = 1000, 240, max(curve)
    above = limit if limit < 2 * top else top
    points = " ".join(f"{i * width / max(1, len(curve) - 1):.1f},{height - size * height / above:.1f}" for i, size in
                      enumerate(curve))  # fmt: skip
    edge = f'<line x1="0" x2="{width}" y1="1" y2="1" stroke="#c33" stroke-dasharray="6 4"/>' if above == limit else ""
    words = "memory in use over the allocations of the process" + (", and the card's limit" if edge else "")
    line = f'<polyline points="{points}" fill="none" stroke="#38c" stroke-width="1.5"/>'
    return f'<figure><svg viewBox="0 0 {width} {height}">{edge}{line}</svg><figcaption>{words}</figcaption></figure>'
