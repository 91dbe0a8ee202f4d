"""`profile` and `doctor`: any training script under the monitor, and what its memory suffers from."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightfit.cli import options
from tightfit.cli.asking import columns, show
from tightfit.cli.ending import INTERRUPTED
from tightfit.cli.question import Question
from tightfit.errors import CannotFit, InputError, OutputError

if TYPE_CHECKING:
    from tightfit.training.monitoring.watch import Monitor

# Everything behind SCRIPT is the script's own, options too.
SCRIPT_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
FAILED = 1  # Python's exit code where an exception ends a script


def profile(
    ctx: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script.", show_default=False)],
    arguments: options.ScriptArguments = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the record goes (else SCRIPT's name with -memory.json, here)."),
    ] = None,
    step: Annotated[int, typer.Option(metavar="N", min=1, help="The step that is watched operator by operator.")] = 2,
) -> None:
    """Run a training script, unchanged, and record its memory.

    Options of this command stand before SCRIPT; all that follows is the
    script's. What the script prints, and its exit code, stay its own: the
    summary goes to stderr, the record to FILE, a picture beside it.

    [dim]tightfit profile train.py --lr 3e-4[/]
    """
    target = output or Path(f"{script.stem}-memory.json")
    check_writable(target)
    from tightfit.training.monitoring.describe import describe_record
    from tightfit.training.monitoring.script import profile_script

    folder = Path.cwd()
    run = profile_script(script, arguments or [], traced_step=step)
    write_record(run.watch, folder / target)
    typer.echo(f"\n{describe_record(run.watch.record(), columns())}\n\nWritten: {target}", err=True)
    leave(run.error, script)


def check_writable(target: Path) -> None:
    """Raises `OutputError` before hours of training, not after."""
    folder = target.parent
    if target.is_dir():
        raise OutputError(f"{target}: is a folder: name a file for --output")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"{target}: the folder {folder} is not there or cannot be written: name another --output")


def write_record(watch: "Monitor", target: Path) -> None:
    """The JSON, and the picture where matplotlib is installed."""
    try:
        watch.to_json(target)
        watch.to_png(target.with_suffix(".png"))
    except InputError as error:  # no matplotlib: the record is there
        typer.echo(str(error), err=True)
    except OSError as error:
        raise OutputError(f"{target}: the record cannot be written: {error.strerror}") from error


def leave(error: BaseException | None, script: Path) -> None:
    """End as the script would have ended, with the exception that ended it, if one did."""
    from tightfit.training.monitoring.script import from_script_on

    if error is None:
        return
    if isinstance(error, SystemExit):
        raise error
    error = from_script_on(error, script)
    sys.excepthook(type(error), error, error.__traceback__)
    raise typer.Exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED)


def run(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What is to be run, as it is.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="A card's name or figures; tightfit devices lists them. cuda: yours.")
    ] = "",
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="All of its memory, such as 8GiB, instead of its own.")
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", help="The number of cards.")] = 1,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="End the command after N optimizer steps (0: never; else 3).")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="True numbers, computed by the CPU: slow.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Make large copies too, as for weights from a disk.")] = False,
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PyTorch's own memory snapshot, for its memory viewer.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="End the command after this time.")] = None,
    html: options.Html = None,
    as_json: options.Json = False,
) -> None:
    """Run any script on a card that you do not have: does it fit, and why?

    The command runs unchanged, with PyTorch's own CUDA build on a CUDA
    runtime that computes nothing: what it takes of the card is measured, by
    PyTorch's own allocator. Exit code 3 if it does not fit.

    [dim]tightfit run --device rtx3060 -- python train.py --batch-size 8[/]

    [dim]tightfit run --device a100 --count 2 -- torchrun --nproc-per-node 2 train.py[/]
    """
    from tightfit.training.monitoring.cards.command import STEPS
    from tightfit.training.monitoring.cards.command import run as run_on_cards
    from tightfit.training.monitoring.cards.describe import describe_run, write_page

    if not device:
        raise InputError("--device is missing: name a card, such as --device rtx4090 (tightfit devices lists them)")
    if not command:
        raise InputError("no command: write -- and what is to be run, such as -- python train.py")
    for target in (html,) if html is not None else ():
        check_writable(target)
    found = run_on_cards(
        command,
        device=device,
        memory=memory,
        count=count,
        steps=STEPS if steps is None else steps,
        values=values,
        load=load,
        snapshot=snapshot,
        timeout=timeout,
    )
    if html is not None:
        write_page(found, html)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        typer.echo(f"\n{describe_run(found, columns())}", err=True)
        if found.out_of_memory is not None and found.out_of_memory.message:
            typer.echo(f"\n{_remedies(found.out_of_memory.message)}", err=True)
    if found.fits is False:
        raise typer.Exit(CannotFit.exit_code)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _remedies(message: str) -> str:
    """The doctor's remedies for an error of which only the text is known. The text has already told where the memory
    was.
    """
    from tightfit.recipes.doctor.describe import describe_diagnosis
    from tightfit.recipes.doctor.diagnosing import diagnose
    from tightfit.recipes.doctor.reading import read_text

    found = diagnose(read_text(message, "the command"))
    return describe_diagnosis(replace(found, advice=()), columns())


@options.asking(options.OF_A_STEP)
def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A record of profile, a CUDA memory snapshot, a plan or an estimate as JSON, or a log with an "
            "out-of-memory error; - reads a log from stdin.",
        ),
    ] = None,
    question: Question | None = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Print versions, the machine and what FILE (may be left out) says, for an issue; no folder's name.",
            rich_help_panel=options.THE_ANSWER,
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say why memory ran out, or where it goes, and what helps.

    With a CONFIG or --model the step is run dry, as it is and with each
    remedy, and the remedies come ranked, with their price.

    [dim]tightfit doctor train-memory.json --model cpu26 --batch-size 4[/]

    [dim]python train.py 2>&1 | tightfit doctor -[/]

    [dim]tightfit doctor --report plan.json[/]
    """
    from tightfit.recipes.doctor.describe import describe_diagnosis
    from tightfit.recipes.doctor.diagnosing import ASK_COMMAND, ASK_PYTHON, diagnose, diagnose_asked
    from tightfit.recipes.doctor.reading import read_subject, read_text

    if file is None and not report:
        raise InputError("nothing to read: give a FILE, or - for a log from stdin")
    subject = None
    if file is not None:
        subject = read_text(sys.stdin.read(), "stdin") if str(file) == "-" else read_subject(file)
    if report:
        _show_report(subject, question, as_json)
        return
    if question is None:
        found = diagnose(subject)
        found = replace(found, advice=tuple(ASK_COMMAND if line == ASK_PYTHON else line for line in found.advice))
    else:
        from tightfit.cli.subject import subject_of

        step = subject_of(question, dry=True)
        with step.rejections():
            found = diagnose_asked(subject, step.asked.counted())
    show(found.to_dict() if as_json else describe_diagnosis(found, columns()))


def _show_report(subject: Any, question: Question | None, as_json: bool) -> None:
    from tightfit.planner.plans import Plan
    from tightfit.recipes.doctor.bug_report import bug_report
    from tightfit.recipes.doctor.diagnosing import diagnose

    if question is not None or as_json:
        raise InputError("--report asks about no model and has no JSON: leave the other options out")
    plan = subject if isinstance(subject, Plan) else None
    typer.echo(bug_report(None if subject is None else diagnose(subject), plan and plan.to_dict()))
