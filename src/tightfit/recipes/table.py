"""The table of recipes for a terminal."""

from collections.abc import Callable, Sequence

from rich.table import Table

from tightfit.recipes.records import Outcome, RecipesRecord
from tightfit.report.terminal import WIDTH, rendered, table_of, width_of
from tightfit.units import format_bytes, format_seconds

ABSENT = "-"
NEAREST = 5  # rows that a table has where fewer fit
FIRST_LEFT_OUT = ("largest batch", "step", "levers", "changes", "longest")  # where the terminal is narrow
NAMES = {"chunked_loss": "chunked", "micro_batch": "micro-batch"}  # of levers, in a narrow column
ERROR = "Seconds of a card that is not here follow its published rates: docs/accuracy.md has the error."


def describe_recipes(found: RecipesRecord, width: int = WIDTH) -> str:
    """The recipes that fit as a table, best first; where few do, the nearest of the others too. Behind it is how many
    more there are.
    """
    shown = shown_of(found)
    table, left_out = recipe_table(shown, width)
    lines = [""]
    if rest := len(found) - len(shown):
        least = min(outcome.needed_bytes for outcome in found[len(shown) :])
        lines.append(f"{rest} more do not fit: from {format_bytes(least)}. With --json all are written.")
    lines += found.notes
    if any(o.fits for o in found):
        lines.append("~ is read off a line through a few dry runs; figures without it were run dry.")
        lines.append(ERROR)
    if left_out:
        lines.append(f"Left out, as the terminal is narrow: {', '.join(left_out)}. With --json all are written.")
    about = ", ".join(part for part in (found.model, found.batch) if part)
    return rendered(*([f"{about}:"] if about else []), found.sentence, "", table, *lines, width=width)


def shown_of(found: RecipesRecord) -> Sequence[Outcome]:
    """The recipes that a table shows: those that fit, which come first, and at least `NEAREST` in all."""
    return found[: max(len(found.fitting), NEAREST)]


def recipe_table(found: Sequence[Outcome], width: int) -> tuple[Table, list[str]]:
    """One row a recipe, and the names of the figures for which `width` columns have no room."""
    figures: dict[str, Callable[[Outcome], str]] = {
        "peak": lambda o: format_bytes(o.peak_bytes) if o.fits else f"needs {format_bytes(o.needed_bytes)}",
        "longest": lambda o: ABSENT if o.longest_sequence is None else str(o.longest_sequence),
        "largest batch": lambda o: ABSENT if o.largest_batch is None else str(o.largest_batch),
        "step": lambda o: ABSENT if o.step_seconds is None else format_seconds(o.step_seconds),
        "tokens/s": lambda o: ABSENT if o.tokens_per_second is None else f"{o.tokens_per_second:,.0f}",
        "changes": lambda o: o.changes,
        "levers": lambda o: ", ".join(NAMES.get(name, name) for name in o.levers) or ABSENT,
    }
    left_out: list[str] = []
    waiting = list(FIRST_LEFT_OUT)
    while True:
        table = table_of("", "recipe", *figures, texts=("recipe", "changes", "levers"))
        table.columns[0].no_wrap = True
        for number, outcome in enumerate(found, start=1):
            table.add_row(str(number), outcome.name, *(figure(outcome) for figure in figures.values()))
        if _least_width(table, figures) <= width or not waiting:
            return table, left_out
        dropped = waiting.pop(0)
        del figures[dropped]
        left_out.append(dropped)


TEXT = 22  # columns in which words can be read folded


def _least_width(table: Table, figures: dict[str, Callable[[Outcome], str]]) -> int:
    """The columns of a table whose words are folded, and whose figures are not."""
    words = [column for column in table.columns if column.header in ("recipe", "changes", "levers")]
    longest = [max((len(str(cell)) for cell in column.cells), default=0) for column in words]
    return width_of(table) - sum(max(0, length - TEXT) for length in longest)
