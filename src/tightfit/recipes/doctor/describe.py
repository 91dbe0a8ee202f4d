"""A diagnosis as text for a terminal of a given width."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.recipes.doctor.records import DiagnosisRecord
from tightfit.recipes.ways import Remedy
from tightfit.units import format_bytes, format_seconds

ROOMY = 84  # columns
CHANGES = {"exact": "no bit", "rounding": "rounding", "inexact": "numerics"}


def describe_diagnosis(diagnosis: DiagnosisRecord, width: int = WIDTH) -> str:
    """The findings, the holders of the memory, the remedies with their price, and the lines to add, unbroken."""
    parts: list[Table | str] = [f"Diagnosis of {diagnosis.subject}", "", *diagnosis.findings]
    if diagnosis.by_category:
        parts += ["", _sizes("at the peak", list(diagnosis.by_category.items()))]
    if diagnosis.holders:
        parts += ["", _sizes("held by", [(holder.name, holder.bytes) for holder in diagnosis.holders])]
    sections = [rendered(*parts, width=width)]
    if diagnosis.remedies:
        sections += [rendered(remedy_table(diagnosis.remedies, width), width=width), _lines(diagnosis.remedies)]
    if diagnosis.advice:
        sections += [rendered(*diagnosis.advice, width=width)]
    return "\n\n".join(sections)


def _sizes(title: str, sizes: Sequence[tuple[str, int]]) -> Table:
    table = table_of(title, "bytes")
    for name, size in sizes:
        if size:
            table.add_row(name, format_bytes(size))
    return table


def remedy_table(remedies: Sequence[Remedy], width: int = WIDTH) -> Table:
    """The remedies, the best first. A narrow terminal gets no column "leaves"."""
    is_wide, has_limit = width >= ROOMY, any(remedy.fits is not None for remedy in remedies)
    columns = ["remedy", "saves", *(["leaves"] if is_wide else []), "step", "changes", *(["fits"] if has_limit else [])]
    table = table_of(*columns, texts=("remedy",))
    for number, remedy in enumerate(remedies, 1):
        figures = {
            "remedy": f"{number}. {remedy.name}",
            "saves": "" if remedy.saved_bytes is None else format_bytes(remedy.saved_bytes),
            "leaves": "" if remedy.peak_bytes is None else format_bytes(remedy.peak_bytes),
            "step": "" if remedy.added_seconds is None else _signed(remedy.added_seconds),
            "changes": CHANGES[remedy.exactness],
            "fits": "yes" if remedy.fits else "no",
        }
        table.add_row(*(figures[column] for column in columns))
    return table


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _lines(remedies: Sequence[Remedy]) -> str:
    """The lines to add, numbered as in the table. They are never broken, so that they can be copied."""
    lines = []
    for number, remedy in enumerate(remedies, 1):
        lines += [f"{number}. Python:  {remedy.python}", f"   YAML:    {remedy.yaml}"]
    return "\n".join(lines)


class Diagnosis(DiagnosisRecord):
    """A diagnosis that can be printed and written."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, path: str | Path) -> None:
        """Write the diagnosis to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return describe_diagnosis(self)
