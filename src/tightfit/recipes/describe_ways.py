"""Ways out as text for a terminal of a given width."""

from rich.table import Table

from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.recipes.ways import WayOut, WaysOut
from tightfit.units import format_bytes

SHOWN = 6  # of the ways that fit
ROOMY = 110  # columns


def describe_ways_out(found: WaysOut, width: int = WIDTH, *, in_config: bool = False) -> str:
    """The first few ways that fit, with the options that take them; or a sentence that nothing does. Notes say what was
    not tried, and why.

    With `in_config`, overrides of a configuration stand in the place of options.
    """
    shown = found.fitting[:SHOWN]
    parts: list[Table | str] = [found.sentence] if found.sentence else []
    if shown:
        parts += ["", ways_table(shown, width)]
    sections = [rendered(*parts, width=width)] if parts else []
    taking = [way.overrides if in_config else way.flags for way in shown]
    if any(taking):
        sections.append("\n".join(f"{number}. {line}" for number, line in enumerate(taking, 1) if line))
    if found.notes:
        sections.append(rendered(*found.notes, width=width))
    return "\n".join(sections)


def ways_table(ways: tuple[WayOut, ...], width: int = WIDTH) -> Table:
    """The ways, numbered. A narrow terminal gets no column "levers"."""
    is_wide = width >= ROOMY
    columns = ["way out", "peak", "changes", *(["levers"] if is_wide else [])]
    table = table_of(*columns, texts=("way out", "changes", "levers"))
    for number, way in enumerate(ways, 1):
        figures = [f"{number}. {way.name}", format_bytes(way.peak_bytes), way.changes]
        table.add_row(*figures, *([way.levers] if is_wide else []))
    return table
