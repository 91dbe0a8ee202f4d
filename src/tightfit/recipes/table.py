"""Recipes, and ways out of a refusal, as tables for a terminal."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.table import Table

from tightfit.planner.report.terminal import WIDTH, narrowed, rendered, table_of
from tightfit.recipes.records import Outcome, RecipesRecord
from tightfit.recipes.ways import WayOut, WaysOut
from tightfit.units import format_bytes, format_seconds

SHOWN_WAYS = 6  # of those that fit
ROOMY = 110  # columns, from which on ways have their levers too
ABSENT = "-"
NEAREST = 3  # rows of recipes that do not fit, those that need least
FIRST_LEFT_OUT = ("host", "step", "largest batch")  # where the terminal is narrower still
NAMES = {"chunked_loss": "chunked loss", "micro_batch": "micro-batches"}  # of levers
TEXT = 26  # columns in which a recipe's name can be read folded
ERROR = "Seconds of a card that is not here follow its published rates: docs/accuracy.md has the error."


def describe_recipes(found: RecipesRecord, width: int = WIDTH, *, whole: bool = False) -> str:
    """The recipes that fit as a table, best first, and the nearest of those that do not (with `whole`, all of them).
    Behind it is how many more there are.
    """
    shown = found if whole else shown_of(found)
    table, left_out = recipe_table(shown, width)
    lines = [""]
    if rest := len(found) - len(shown):
        least = min(outcome.needed_bytes for outcome in found[len(shown) :])
        lines.append(f"{rest} more do not fit: from {format_bytes(least)}. --all shows them.")
    lines += found.notes
    if any(o.fits for o in found):
        lines.append("~ is read off a line through a few dry runs; figures without it were run dry.")
        lines.append(ERROR)
    if left_out:
        lines.append(f"Left out, as the terminal is narrow: {', '.join(left_out)}. --json writes all.")
    about = ", ".join(part for part in (found.model, found.batch) if part)
    head = [*([f"{about}:"] if about else []), found.sentence, ""]
    return rendered(*head, *_with_words(shown, table, width), *lines, width=width)


def shown_of(found: RecipesRecord) -> Sequence[Outcome]:
    """The recipes that a table shows: those that fit, which come first, and the nearest of the others."""
    return found[: len(found.fitting) + NEAREST]


def recipe_table(found: Sequence[Outcome], width: int) -> tuple[Table, list[str]]:
    """One row of figures a recipe, and the names of those for which `width` columns have no room."""
    figures: dict[str, Callable[[Outcome], str]] = {
        "peak": lambda o: format_bytes(o.peak_bytes if o.fits else o.needed_bytes),
        "host": lambda o: ABSENT if o.host_peak_bytes is None else format_bytes(o.host_peak_bytes),
        "longest": lambda o: ABSENT if o.longest_sequence is None else str(o.longest_sequence),
        "largest batch": lambda o: ABSENT if o.largest_batch is None else str(o.largest_batch),
        "step": lambda o: ABSENT if o.step_seconds is None else format_seconds(o.step_seconds),
        "tokens/s": lambda o: ABSENT if o.tokens_per_second is None else f"{o.tokens_per_second:,.0f}",
    }

    def made(names: Sequence[str]) -> Table:
        table = table_of("", "recipe", *(name.replace(" ", "\n") for name in names), texts=("recipe",))
        table.columns[0].no_wrap = True
        for number, outcome in enumerate(found, start=1):
            table.add_row(str(number), outcome.name, *(figures[name](outcome) for name in names))
        return table

    return narrowed(made, list(figures), FIRST_LEFT_OUT, width, TEXT)


def _with_words(found: Sequence[Outcome], table: Table, width: int) -> Iterator[str]:
    """The table's lines, and below each recipe what it changes and its levers: the figures need all columns."""
    behind = ""
    indent = " " * (len(str(len(found))) + 3)  # the column of names
    for line in rendered(table, width=width).splitlines():
        number = line.partition(" ")[0]
        if number.isdecimal():
            yield from filter(None, [behind])
            outcome = found[int(number) - 1]
            if not outcome.fits and (number == "1" or found[int(number) - 2].fits):
                yield from ("", "The nearest that do not fit, with what they need:")
            behind = f"{indent}changes {outcome.changes}{_levers(outcome)}"
        yield line
    yield from filter(None, [behind])


def _levers(outcome: Outcome) -> str:
    words = f"; levers {', '.join(NAMES.get(name, name) for name in outcome.levers)}" if outcome.levers else ""
    if outcome.streamed_blocks and outcome.host_peak_bytes is not None:
        words += f"; {format_bytes(outcome.host_peak_bytes)} of the host"
    return words


def describe_ways_out(found: WaysOut, width: int = WIDTH, *, taken_by: str = "options") -> str:
    """The first few ways that fit, with what takes them; or a sentence that nothing does. Notes say what was not tried,
    and why. `taken_by` is that of `Refusal`.
    """
    shown = found.fitting[:SHOWN_WAYS]
    parts: list[Table | str] = [found.sentence] if found.sentence else []
    if shown:
        parts += ["", ways_table(shown, width)]
    sections = [rendered(*parts, width=width)] if parts else []
    taking = [{"options": way.flags, "overrides": way.overrides}.get(taken_by, "") for way in shown]
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


class Recipes(RecipesRecord):
    """Recipes that can be printed and written, best first."""

    def __str__(self) -> str:
        return describe_recipes(self)

    def to_json(self, path: str | Path) -> None:
        """Write the recipes to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
