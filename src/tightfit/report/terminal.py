"""Formats tables and lines as text for a terminal of a given width."""

import io
import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 100


def rendered(*items: Table | str, width: int = WIDTH) -> str:
    """Tables and lines as text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    for item in items:
        if isinstance(item, str):  # a path is not broken, however long it is, so that it can be copied
            lines = textwrap.wrap(item, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            console.print("\n".join(lines), soft_wrap=True)
        else:
            console.print(item)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def width_of(table: Table) -> int:
    """The columns that a table takes where none of its words are folded."""
    return Console(width=10_000).measure(table).maximum


def table_of(*columns: str, texts: Sequence[str] = ()) -> Table:
    """A table. The first column and those in `texts` hold words and may wrap. The others hold figures."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        is_text = index == 0 or column in texts
        justify = "left" if is_text else "right"
        table.add_column(column, justify=justify, no_wrap=bool(texts) and not is_text, overflow="fold")
    return table
