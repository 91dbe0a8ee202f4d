"""`train`: the whole road, with a progress bar and the outcome at the end."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli import options
from tightfit.cli.asking import columns
from tightfit.cli.ending import ends_in_order
from tightfit.names import PAGE, PICTURE, PLAN

if TYPE_CHECKING:
    from rich.table import Table

    from tightfit import Plan, TrainResult


def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML configuration of a training.", show_default=False)
    ],
    overrides: options.Overrides = None,
    resume: options.Resume = False,
    device: options.TrainsOn = None,
) -> None:
    """Train a model as CONFIG says, within its memory budget.

    The peak is predicted before the first step, and measured. The run's
    folder then holds the weights, the tokenizer, the plan, the metrics, a
    picture of the memory and a page for the browser. Ctrl-C, SIGTERM,
    SIGHUP and SIGUSR1 end it with a checkpoint and all of that written; a
    second one ends it at once. --resume goes on as if nothing had happened.

    [dim]tightfit train examples/quickstart.yaml[/]

    [dim]tightfit train my.yaml memory.budget=20GiB training.precision=bf16[/]

    [dim]tightfit train my.yaml --resume training.max_steps=2000[/]

    [dim]torchrun --nproc-per-node 2 -m tightfit train my.yaml[/]
    """
    with ends_in_order():
        from tightfit.cli.progress import ProgressReporter
        from tightfit.training.api import train as run

        reporter, said = ProgressReporter(), options.on_device(overrides, device)
        try:
            with reporter:
                run(config, said, reporter=reporter, resume=resume)
        finally:  # an interrupted training has an outcome too
            if reporter.result is not None:
                typer.echo(outcome(reporter.result, reporter.plan, columns(), resuming("train", config, said)))


def resuming(command: str, config: str, overrides: Sequence[str]) -> str:
    """The line that goes on with a training. Without its overrides it would be another training."""
    return shlex.join(("tightfit", command, config, *overrides, "--resume"))


def outcome(result: "TrainResult", plan: "Plan | None", width: int, resuming: str = "") -> str:
    """Plain, predicted and measured side by side; the losses; a sample; where everything is. Of a training that was
    stopped, the command that goes on (`resuming`).
    """
    from tightfit.planner.report.terminal import rendered

    sample = ("", "A sample:", *(f"  {line}" for line in result.sample.splitlines())) if result.sample else ()
    ran = rendered("", figures(result, plan), "", *losses(result), *sample, width=width)
    return "\n".join((ran, *stopped(result, resuming), "", rendered(where(result), width=width)))


def stopped(result: "TrainResult", resuming: str) -> tuple[str, ...]:
    """The message about a training that a signal has ended. Its command is not broken into lines, so that it can be
    copied.
    """
    if not result.interrupted:
        return ()
    of = "" if result.max_steps is None else f" of {result.max_steps}"
    return "", f"Stopped after {result.steps}{of} steps, and a checkpoint is kept. To go on:", f"  {resuming}"


def where(result: "TrainResult") -> str:
    """The folder, and which of its files show the step."""
    folder = Path(result.folder)
    shows = [name for name in (PICTURE, PAGE) if (folder / name).is_file()]
    said = [f"{' and '.join(shows)} show{'' if len(shows) > 1 else 's'} the step"] if shows else []
    said += [f"{PLAN} has the figures"] if (folder / PLAN).is_file() else []
    return f"The run is in {result.folder}{': ' if said else ''}{', '.join(said)}."


def figures(result: "TrainResult", plan: "Plan | None") -> "Table":
    """Memory and time of a step: plain, as predicted for the step that ran, and as measured."""
    from tightfit.planner.report.terminal import table_of
    from tightfit.units import format_bytes, format_seconds

    measured = result.measured_step_seconds
    table = table_of("", "plain", "predicted", "measured", "budget")
    table.add_row(
        "peak memory",
        format_bytes(result.plain_peak_bytes),
        format_bytes(result.predicted_peak_bytes),
        format_bytes(result.measured_peak_bytes),
        "" if result.budget_bytes is None else format_bytes(result.budget_bytes),
    )
    table.add_row(
        "of plain",
        "100%",
        *(
            f"{peak / result.plain_peak_bytes:.1%}"
            for peak in (result.predicted_peak_bytes, result.measured_peak_bytes)
        ),
        # A budget beyond the plain step is no share of it that says anything.
        f"{result.budget_bytes / result.plain_peak_bytes:.1%}"
        if result.budget_bytes is not None and result.budget_bytes <= result.plain_peak_bytes
        else "",
    )
    for name, predicted in (result.predicted_phase_bytes or {}).items():
        seen = (result.measured_phase_bytes or {}).get(name)
        shown = "" if seen is None else format_bytes(seen)
        table.add_row(name.replace("_", " "), "", format_bytes(predicted), shown)
    plain_step = "" if plan is None else format_seconds(plan.plain.step_seconds)
    table.add_row(
        "step",
        plain_step,
        format_seconds(result.predicted_step_seconds),
        "" if measured is None else format_seconds(measured),
    )
    return table


def losses(result: "TrainResult") -> list[str]:
    """How the loss fell, in sentences."""
    lines = [
        f"Loss {result.first_loss:.3f} -> {result.last_loss:.3f} in {result.steps} steps "
        f"({result.tokens:,} tokens, {result.tokens_per_second:,.0f} a second)."
    ]
    if result.validation_loss is not None:
        known = "" if result.perplexity is None else f" (perplexity {result.perplexity:,.1f})"
        lines.append(f"On held-out {'samples' if not known else 'text'} {result.validation_loss:.3f}{known}.")
    if result.skipped_steps:
        lines.append(
            f"{result.skipped_steps} of {result.steps} steps skipped: gradients beyond fp16, so the scale fell."
        )
    return lines
