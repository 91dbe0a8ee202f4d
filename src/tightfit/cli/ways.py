"""The ways out of a plan that cannot fit, on stderr under the error's line."""

from typing import Any

import typer

from tightfit.cli.asking import columns
from tightfit.cli.waiting import Waiting
from tightfit.errors import CannotFit


def show_ways_out(error: CannotFit) -> None:
    """A small table of them; nothing where no plan was asked for."""
    if error.refusal is None:
        return
    typer.echo("Looking for ways out, each run dry ...", err=True)
    from tightfit.recipes.describe_ways import describe_ways_out

    with Waiting() as waiting:
        waiting("looking for ways out")
        found: Any = error.ways_out  # `errors` stands above the room that finds them, and cannot name their type
    if text := describe_ways_out(found, columns(), in_config=error.refusal.in_config):
        typer.echo(f"\n{text}", err=True)
