"""`distil`: a student trained towards its teacher, or the store of the teacher's distributions."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli import options
from tightfit.cli.asking import columns
from tightfit.cli.ending import ends_in_order
from tightfit.cli.training import outcome, resuming

if TYPE_CHECKING:
    from tightfit.cli.progress import ProgressReporter
    from tightfit.models.compress.distilling import DistilResult
    from tightfit.models.compress.store_writing import StoreFigures


def distil(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML configuration of a training.", show_default=False)
    ],
    overrides: options.Overrides = None,
    store_only: Annotated[bool, typer.Option("--store-only", help="Write distil.store, and end.")] = False,
    resume: options.Resume = False,
    device: options.TrainsOn = None,
    as_json: options.Json = False,
) -> None:
    """Train a student towards a teacher, within the memory budget.

    CONFIG has the keys of train, and the section distil. The teacher runs
    beside the student, and its memory is part of the plan; or it writes
    parts of its distributions to distil.store first, and leaves memory.
    A store that was interrupted goes on when the command runs again.

    [dim]tightfit distil my.yaml distil.teacher=runs/large[/]

    [dim]tightfit distil my.yaml distil.teacher=runs/large distil.store=runs/store[/]
    """
    with ends_in_order():
        from tightfit.cli.progress import ProgressReporter
        from tightfit.models.compress.distilling import distil as run

        reporter, said = ProgressReporter(), options.on_device(overrides, device)
        try:
            with reporter:
                found = run(config, said, reporter=reporter, store_only=store_only, resume=resume)
        except BaseException:  # an interrupted training has an outcome too
            if reporter.result is not None and not as_json:
                again = resuming("distil", config, said)
                typer.echo(outcome(reporter.result, reporter.plan, columns(), again))
            raise
        if as_json:
            report = None if found.report is None else found.report.to_dict()
            typer.echo(json.dumps({**found.to_dict(), "report": report}, indent=1))
            return
        typer.echo(described(found, reporter))
        if found.report is not None:
            from tightfit.models.compress.report import describe_report

            typer.echo(f"\n{describe_report(found.report, columns())}")


def described(result: "DistilResult", reporter: "ProgressReporter") -> str:
    """The store, the teacher beside the student, and what `train` says of a training."""
    from tightfit.units import format_bytes

    lines = [] if result.store is None else store_lines(result.store)
    if result.training is None:
        return "\n".join(lines)
    if result.teacher_bytes:
        lines.append(f"The teacher's weights took {format_bytes(result.teacher_bytes)} of each step's peak.")
    else:
        lines.append("The teacher took no memory during the steps.")
    lines.append("The loss of a step is the student's distance from the teacher; held-out text has its cross-entropy.")
    return "\n".join((*lines, outcome(result.training, reporter.plan, columns())))


def store_lines(store: "StoreFigures") -> list[str]:
    """The contents of a store, and the time and memory that writing it took."""
    from tightfit.units import format_bytes, format_seconds

    lines = [
        f"The store {store.folder} has {store.positions:,} tokens in {store.shards} shards: "
        f"{format_bytes(store.disk_bytes)}, {store.bytes_per_token:.1f} bytes a token."
    ]
    if store.predicted_peak_bytes is not None and store.measured_peak_bytes is not None and store.seconds is not None:
        lines.append(
            f"Writing {store.written_shards} shards took {format_seconds(store.seconds)}, {store.samples_at_once} "
            f"samples at once. Its peak was {format_bytes(store.measured_peak_bytes)}, and "
            f"{format_bytes(store.predicted_peak_bytes)} was predicted; the teacher's weights are "
            f"{format_bytes(store.teacher_bytes or 0)} of it."
        )
    return lines
