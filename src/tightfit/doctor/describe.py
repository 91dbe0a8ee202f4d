"""A diagnosis as text for a terminal of a given width."""

from collections.abc import Sequence

from rich.table import Table

from tightfit.doctor.diagnosis import Diagnosis, Remedy
from tightfit.planner.describe import WIDTH, rendered, table_of
from tightfit.units import format_bytes, format_seconds

CHANGES = {"exact": "no bit", "rounding": "rounding", "inexact": "numerics"}


def describe_diagnosis(diagnosis: Diagnosis, width: int = WIDTH) -> str:
    """What happened, who holds the memory, remedies with their price, and the lines to add."""
    parts: list[Table | str] = [f"Diagnosis of {diagnosis.subject}", "", *diagnosis.findings]
    if diagnosis.by_category:
        parts += ["", _sizes("at the peak", list(diagnosis.by_category.items()))]
    if diagnosis.holders:
        parts += ["", _sizes("held by", [(holder.name, holder.bytes) for holder in diagnosis.holders])]
    if diagnosis.remedies:
        parts += ["", remedy_table(diagnosis.remedies), "", *_lines(diagnosis.remedies)]
    if diagnosis.advice:
        parts += ["", *diagnosis.advice]
    return rendered(*parts, width=width)


def _sizes(title: str, sizes: Sequence[tuple[str, int]]) -> Table:
    table = table_of(title, "bytes")
    for name, size in sizes:
        if size:
            table.add_row(name, format_bytes(size))
    return table


def remedy_table(remedies: Sequence[Remedy]) -> Table:
    """The remedies, the best first."""
    table = table_of("remedy", "saves", "leaves", "step", "changes", "fits", texts=("remedy",))
    for number, remedy in enumerate(remedies, 1):
        fits = {True: "yes", False: "no", None: ""}[remedy.fits]
        saved, left = (None, None) if remedy.saved_bytes is None else (remedy.saved_bytes, remedy.peak_bytes)
        table.add_row(
            f"{number}. {remedy.name}",
            "" if saved is None else format_bytes(saved),
            "" if left is None else format_bytes(left),
            "" if remedy.added_seconds is None else _signed(remedy.added_seconds),
            CHANGES[remedy.exactness],
            fits,
        )
    return table


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _lines(remedies: Sequence[Remedy]) -> list[str]:
    """The lines to add, numbered as in the table."""
    lines = []
    for number, remedy in enumerate(remedies, 1):
        lines += [f"{number}. Python:  {remedy.python}", f"   YAML:    {remedy.yaml}"]
    return lines
