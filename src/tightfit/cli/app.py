"""The commands and what happens to their errors: one line on stderr, and the exit code that the error carries."""

from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import tightfit
from tightfit.cli import (
    asking,
    assistants,
    distilling,
    exploring,
    exporting,
    generating,
    measuring,
    minimind,
    observing,
    pruning,
    quantising,
    recipes,
    runs,
    scoring,
    training,
)
from tightfit.cli.asking import columns
from tightfit.cli.together import ranks_started, refuse_several, report_and_end
from tightfit.cli.waiting import Waiting
from tightfit.errors import CannotFit, InputError, OutputError, RankError, TightfitError
from tightfit.memory.disk import NO_ROOM
from tightfit.runtime.idle_lines import leave_out_idle_lines

PROFILE, MINIMIND, RUN = "profile", "minimind", "run"  # the commands whose arguments belong to somebody else's script

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # Typer has a click of its own, or uses the package


class Commands(TyperGroup):
    """The group of commands; turns the user's mistakes into one line each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept `--debug` behind the command too, but not among the arguments of a script."""
        end = next((i for i, argument in enumerate(args) if argument in (PROFILE, MINIMIND, RUN)), len(args))
        if "--debug" in args[:end]:
            args = ["--debug", *(a for a in args[:end] if a != "--debug"), *args[end:]]
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            end_with(misused(error))

    def invoke(self, ctx: Any) -> Any:
        command = next(iter([*getattr(ctx, "_protected_args", ()), *ctx.args]), "")
        try:
            if command in self.commands:
                refuse_several(command)
            return super().invoke(ctx)
        except TightfitError as error:
            if ctx.params["debug"]:
                raise
            end_with(error)
        except SystemExit as ended:
            if isinstance(ended.__context__, RankError) and ranks_started() > 1:  # it came while that was on its way
                end_with(ended.__context__)
            raise
        except UsageError as error:
            end_with(misused(error, command if command in self.commands else ""))
        except OSError as error:
            if ctx.params["debug"] or error.errno not in NO_ROOM:
                raise
            where = error.filename or "where the output goes"
            end_with(OutputError(f"{where}: {error.strerror}: make room, or write to another disk"))


def misused(error: Any, command: str = "") -> InputError:
    """A wrong option or argument of a command, in a line, where Typer draws a box.

    Raises the error again if it is a help text.
    """
    if type(error).__name__ == "NoArgsIsHelpError":  # of a group without a command
        raise error
    names, context = [], error.ctx
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    line = error.format_message().rstrip(".")
    return InputError(
        f"{line[0].lower()}{line[1:]}: see {' '.join(filter(None, ['tightfit', *(names or [command]), '--help']))}"
    )


def end_with(error: TightfitError) -> NoReturn:
    """The error as one line, ways out where a plan cannot fit, and the exit code that the error carries."""

    def report() -> None:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        if isinstance(error, CannotFit):
            show_ways_out(error)

    report_and_end(error, report, error.exit_code)
    raise typer.Exit(error.exit_code) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tightfit {tightfit.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    """Train transformer language models in the memory you have: planned before it runs, proved to be the same.

    A whole training, its peak memory known before it runs:

    [dim]tightfit train examples/quickstart.yaml[/]

    What a model would take, whether or not it fits this machine:

    [dim]tightfit estimate --model llama-8b.json --seq-len 8192 --precision bf16[/]

    Exit codes: 0 done; 2 the input is wrong; 3 no plan fits the budget;
    4 a plan changed what the step computes; 128 + n on a signal.
    """
    leave_out_idle_lines()


app.command()(training.train)
app.command()(distilling.distil)
app.command()(asking.plan)
app.command()(asking.estimate)
app.command()(asking.verify)
app.command()(recipes.fit)
app.command()(exploring.explore)
app.command()(assistants.mcp)
app.command()(generating.generate)
app.command()(scoring.score)
app.command()(exporting.export)
app.command()(pruning.prune)
app.command()(quantising.quantise)
app.add_typer(runs.app, name="runs")
app.command()(measuring.devices)
app.command()(measuring.calibrate)
app.command(PROFILE, context_settings=observing.SCRIPT_ARGUMENTS)(observing.profile)
app.command(RUN, context_settings={"allow_interspersed_args": False})(observing.run)
app.command()(observing.doctor)
app.command(MINIMIND, context_settings=minimind.AMONG_THE_SCRIPTS)(minimind.minimind)


def show_ways_out(error: CannotFit) -> None:
    """A small table of them; nothing where no plan was asked for."""
    if error.refusal is None:
        return
    typer.echo("Looking for ways out, each run dry ...", err=True)
    from tightfit.recipes.table import describe_ways_out

    with Waiting() as waiting:
        waiting("looking for ways out")
        found: Any = error.ways_out  # `errors` stands above the room that finds them, and cannot name their type
    if text := describe_ways_out(found, columns(), taken_by=error.refusal.taken_by):
        typer.echo(f"\n{text}", err=True)
