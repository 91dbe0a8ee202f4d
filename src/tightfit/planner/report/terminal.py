"""Formats tables and lines as text for a terminal of a given width."""

import io
import textwrap
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 100


def rendered(*items: Table | str, width: int = WIDTH) -> str:
    """Tables and lines as text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    for item in items:
        if isinstance(item, str):  # a path is not broken, however long it is, so that it can be copied
            indent = item[: len(item) - len(item.lstrip())] + "  "
            lines = textwrap.wrap(item, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            console.print("\n".join(lines), soft_wrap=True)
        else:
            console.print(item)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def width_of(table: Table, folded: int | None = None) -> int:
    """The columns that a table takes. Columns of words count with at most `folded` characters, where that is given."""
    taken = Console(width=10_000).measure(table).maximum
    if folded is None:
        return taken
    words = [column for column in table.columns if not column.no_wrap]
    longest = [max((len(str(cell)) for cell in column.cells), default=0) for column in words]
    return taken - sum(max(0, length - folded) for length in longest)


def narrowed(
    made: Callable[[Sequence[str]], Table],
    columns: Sequence[str],
    first_left_out: Sequence[str],
    width: int,
    folded: int,
) -> tuple[Table, list[str]]:
    """The table that `made` makes of as many of the columns as `width` has room for, and those that it leaves out.

    Words are folded to `folded` characters, and figures and names never are: `first_left_out` go instead.
    """
    for count in range(len(first_left_out) + 1):
        left_out = list(first_left_out[:count])
        table = made([each for each in columns if each not in left_out])
        if width_of(table, folded) <= width:
            break
    return table, left_out


def table_of(*columns: str, texts: Sequence[str] = ()) -> Table:
    """A table. The first column and those in `texts` hold words and may wrap. The others hold figures."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        is_text = index == 0 or column in texts
        justify = "left" if is_text else "right"
        table.add_column(column, justify=justify, no_wrap=bool(texts) and not is_text, overflow="fold")
    return table
