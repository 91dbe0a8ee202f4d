"""`minimind`: MiniMind's own trainer scripts, under a plan."""

from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli import options
from tightfit.cli.asking import columns
from tightfit.cli.observing import leave
from tightfit.cli.together import is_silent

# The script's own options may stand among ours, as if they were all the script's.
AMONG_THE_SCRIPTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def minimind(
    ctx: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A trainer script of a MiniMind checkout.", show_default=False)
    ],
    arguments: options.ScriptArguments = None,
    use_checkpoint: Annotated[
        bool, typer.Option("--use_checkpoint", help="Recompute every block in backward.")
    ] = False,
    memory_budget: Annotated[
        str | None, typer.Option("--memory_budget", metavar="BUDGET", help="The peak to stay within: 0.5x, 8GiB, 80%.")
    ] = None,
    segments: Annotated[
        int | None, typer.Option(metavar="K", help="With --use_checkpoint: blocks joined to K segments.")
    ] = None,
    ffn_only: Annotated[
        bool, typer.Option("--ffn_only", help="Recompute the feed-forward part of blocks only.")
    ] = False,
) -> None:
    """Run a trainer script of MiniMind, unmodified, within a memory budget.

    SCRIPT runs as `python SCRIPT` would, from the folder it is written
    for; its own options may stand among these. Before the first step is
    computed a plan is made for its model, batch and loss; losses and
    gradients stay bit-equal. A report goes to stderr at the end.

    [dim]tightfit minimind train_pretrain.py --use_moe 1 --memory_budget 0.5x[/]
    """
    from tightfit.integrations.minimind import MemoryFlags, run_minimind
    from tightfit.integrations.minimind.report import describe_run

    flags = MemoryFlags(use_checkpoint, memory_budget, segments, ffn_only)
    run = run_minimind(script, arguments or [], flags)
    if not is_silent():
        typer.echo(f"\n{describe_run(run, columns())}", err=True)
    leave(run.error, script)
