"""`runs`: what the folders of runs hold, in a list, one by one, and side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tightfit.cli import options
from tightfit.cli.asking import columns, show, write
from tightfit.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tightfit.training.run_folders.records import CheckpointRecord, RunRecord

LIST = "list"  # what `tightfit runs FOLDER` does
LEAST_COMPARED = 2
ABSENT = "–"
FIRST_LEFT_OUT = ("ckpts", "size", "tok/s", "budget", "held out", "predicted", "measured", "loss")


class ListedByDefault(TyperGroup):
    """A group that lists where its first argument is no command of it: `tightfit runs FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_other = args[:1] in (["--help"], ["-h"]) or (args and args[0] in self.commands)
        return super().parse_args(ctx, args if is_other else [LIST, *args])


app = typer.Typer(cls=ListedByDefault, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def runs() -> None:
    """List runs, show one with its checkpoints, or compare several.

    [dim]tightfit runs runs[/]

    [dim]tightfit runs show runs/quickstart[/]

    [dim]tightfit runs compare runs/a runs/b --output losses.png[/]
    """


@app.command(LIST)
def listed(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Holds runs, at any depth up to 3.")] = Path(
        "runs"
    ),
    as_json: options.Json = False,
) -> None:
    """List the runs in a folder: state, steps, losses, memory, speed, checkpoints, size.

    [dim]tightfit runs runs[/]
    """
    from tightfit.training.run_folders.records import runs_in

    found = runs_in(folder)
    if as_json:
        show([run.to_dict() for run in found])
    elif not found:
        show(f"{folder} holds no runs.")
    else:
        table, left_out = table_of_runs(found, columns())
        lines = [f"{run.name}: {line}" for run in found for line in run.problems]
        if left_out:
            lines.append(f"Left out, as the terminal is narrow: {', '.join(left_out)}. With --json all are written.")
        show(as_lines(table, *lines))


@app.command("show")
def show_run(
    run: options.Run,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte of the checkpoints.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what a run holds, and whether each of its checkpoints is intact.

    Of a checkpoint's files the sizes are compared; with --verify, every byte.

    [dim]tightfit runs show runs/quickstart[/]
    """
    from tightfit.training.run_folders.records import checkpoints_of, run_at

    found = run_at(run)
    checkpoints = checkpoints_of(run, verify=verify)
    if as_json:
        show({**found.to_dict(), "checkpoints": [checkpoint.to_dict() for checkpoint in checkpoints]})
        return
    parts: list[Table | str] = [table_of_results([found])]
    if checkpoints:
        parts += ["", table_of_checkpoints(checkpoints)]
        parts += [f"{c.path}: {_reason(c)}" for c in checkpoints if c.problem is not None]
    show(as_lines(*parts, *(("", *found.problems) if found.problems else ())))


@app.command("compare")
def compare(
    run_folders: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="The folders of two runs or more.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw their losses into a PNG (needs matplotlib).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare runs: what is different in their configurations, what came of them, and their loss curves.

    [dim]tightfit runs compare runs/a runs/b --output losses.png[/]
    """
    from tightfit.training.run_folders.records import config_of, curve_of, differences, run_at

    if len(run_folders) < LEAST_COMPARED:
        raise InputError("runs compare takes the folders of two runs or more: name another one")
    found = [run_at(folder) for folder in run_folders]
    different = differences([config_of(run) for run in found])
    if output is not None:
        from tightfit.planner.report.loss_curves import loss_picture

        curves, lines = zip(*map(curve_of, found), strict=True)
        picture = loss_picture(curves)
        write("picture", lambda path: path.write_bytes(picture), output)
        said = [f"{run.name}: {line}" for run, each in zip(found, lines, strict=True) for line in each]
    else:
        said = []
    if as_json:
        show({"runs": [run.to_dict() for run in found], "differences": different})
        return
    problems = [*(f"{run.name}: {line}" for run in found for line in run.problems), *said]
    drawn = ["", f"The losses are drawn in {output}."] if output is not None else []
    show(as_lines(table_of_results(found), "", *_configurations(found, different), *drawn, *dict.fromkeys(problems)))


def _configurations(found: "Sequence[RunRecord]", different: dict[str, list[Any]]) -> "list[Table | str]":
    if not different:
        return ["Their configurations are the same."]
    from tightfit.planner.report.terminal import table_of

    table = table_of("", *(run.name for run in found))
    for key, values in different.items():
        table.add_row(key, *map(_value, values))
    return [table]


def as_lines(*parts: "Table | str") -> str:
    from tightfit.planner.report.terminal import rendered

    return rendered(*parts, width=columns())


def table_of_runs(found: "Sequence[RunRecord]", width: int) -> "tuple[Table, list[str]]":
    """One row a run, and the names of the figures for which `width` columns have no room."""
    from tightfit.planner.report.terminal import table_of, width_of

    figures = {
        "steps": _steps,
        "loss": lambda run: _loss(run.loss),
        "held out": lambda run: _loss(run.validation_loss),
        "predicted": lambda run: _size(run.predicted_peak_bytes),
        "measured": lambda run: _size(run.measured_peak_bytes),
        "budget": lambda run: _size(run.budget_bytes),
        "tok/s": lambda run: ABSENT if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        "ckpts": lambda run: str(run.checkpoints),
        "size": lambda run: _size(run.bytes),
    }
    left_out: list[str] = []
    while True:
        table = table_of("", "state", *figures, texts=("state",))
        for run in found:
            table.add_row(run.name, run.state, *(figure(run) for figure in figures.values()))
        # The name folds where it is long. Without this, names and states would be squeezed out by the figures.
        if width_of(table) <= width or len(figures) == 1:
            return table, left_out
        dropped = next(name for name in FIRST_LEFT_OUT if name in figures)
        del figures[dropped]
        left_out.append(dropped)


def table_of_results(found: "Sequence[RunRecord]") -> "Table":
    """One column a run."""
    from tightfit.planner.report.terminal import table_of
    from tightfit.units import format_bytes

    def size(count: int | None) -> str:
        return ABSENT if count is None else format_bytes(count)

    table = table_of("", *(run.name for run in found))
    table.add_row("state", *(run.state + (f" ({run.holder})" if run.holder else "") for run in found))
    table.add_row("steps", *map(_steps, found))
    table.add_row("loss", *(_loss(run.loss) for run in found))
    table.add_row("loss on held-out samples", *(_loss(run.validation_loss) for run in found))
    table.add_row("predicted peak", *(size(run.predicted_peak_bytes) for run in found))
    table.add_row("measured peak", *(size(run.measured_peak_bytes) for run in found))
    table.add_row("budget", *(size(run.budget_bytes) for run in found))
    speeds = [ABSENT if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}" for run in found]
    table.add_row("tokens a second", *speeds)
    table.add_row("checkpoints", *(str(run.checkpoints) for run in found))
    table.add_row("size on disk", *(size(run.bytes) for run in found))
    return table


def table_of_checkpoints(found: "Sequence[CheckpointRecord]") -> "Table":
    from tightfit.planner.report.terminal import table_of
    from tightfit.units import format_bytes

    table = table_of("checkpoint", "size", "tensors", "held out", "")
    for one in found:
        whole = "intact" if one.verified else "complete"
        table.add_row(
            f"step {one.step}",
            ABSENT if one.bytes is None else format_bytes(one.bytes),
            ABSENT if one.tensors is None else str(one.tensors),
            _loss(one.validation_loss),
            whole if one.problem is None else "damaged",
        )
    return table


def _reason(checkpoint: "CheckpointRecord") -> str:
    return str(checkpoint.problem).removeprefix(f"{checkpoint.path}: ")


def _steps(run: "RunRecord") -> str:
    return f"{run.steps:,}" if run.max_steps in (None, run.steps) else f"{run.steps:,} of {run.max_steps:,}"


def _loss(loss: float | None) -> str:
    return ABSENT if loss is None else f"{loss:.3f}"


def _size(count: int | None) -> str:
    from tightfit.units import brief_bytes

    return ABSENT if count is None else brief_bytes(count)


def _value(value: Any) -> str:
    return ABSENT if value is None else str(value)
