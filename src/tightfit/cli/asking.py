"""`estimate`, `plan` and `verify`: questions about a training step, answered on the terminal or as JSON."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightfit.cli import options
from tightfit.cli.inference import check_inference, inferred
from tightfit.cli.question import LEVERS, NO_BUDGET, Question
from tightfit.cli.waiting import Waiting, say, seldom_collecting, unsaid
from tightfit.errors import BudgetError, InputError, OutputError, VerificationFailed

if TYPE_CHECKING:
    from tightfit import Plan
    from tightfit.cli.subject import Subject
    from tightfit.models.compress.report import CompressionReport
    from tightfit.models.diffusion_phases import PhaseEstimates
    from tightfit.training.grpo import PolicyPhases

NARROWEST, WIDEST = 60, 120  # columns of a table


@options.asking({**options.OF_A_STEP, **options.OF_RANKS})
def estimate(
    question: Question,
    inference: options.Inference = False,
    new_tokens: options.NewTokens = None,
    phase: options.Phase = None,
    as_json: options.Json = False,
    html: options.Html = None,
    png: options.Png = None,
) -> None:
    """Predict the peak memory and the time of one training step, without running it.

    With --inference: those of reading prompts of --seq-len tokens and of
    generating --new-tokens more.

    The model needs no memory and no weights here:
    one that does not fit this machine can be asked about.

    [dim]tightfit estimate examples/quickstart.yaml training.batch_size=16[/]

    [dim]tightfit estimate --model llama-8b.json --seq-len 8192 --precision bf16[/]

    [dim]tightfit estimate --model llama-3.1-8b --seq-len 4096 --precision bf16 --device h100 --world-size 8[/]

    [dim]tightfit estimate --model cpu26 --inference --seq-len 512 --new-tokens 256 --device rtx4090[/]

    [dim]tightfit estimate --model sdxl --adapter r=16 --base bf16 --precision bf16 --device rtx4090 --phase all[/]
    """
    check_inference(question, inference, new_tokens, {"--html": html, "--phase": phase})
    if phase is not None:
        show_phases(question, phase, as_json)
        return
    if inference:
        show_inference(question, new_tokens, as_json, png)
        return
    from tightfit.planner.report.plan_tables import describe_estimate

    with seldom_collecting(), Waiting() as waiting:
        from tightfit.cli.subject import subject_of

        waiting("running the step dry")
        found = subject_of(question, dry=True).estimate()
        write("page", found.to_html, html)
        write("picture", found.to_png, png)
    show(found.to_dict() if as_json else describe_estimate(found, columns()))


def show_phases(question: Question, phase: str, as_json: bool) -> None:
    """Answer `estimate --phase`."""
    with seldom_collecting(), Waiting() as waiting:
        waiting("running the phases dry")
        if question.config is not None:
            of_policy = policy_phases_of(question, phase)
            text = described_policy_phases(of_policy, columns())
            found: PhaseEstimates | PolicyPhases = of_policy
        else:
            found = of_denoiser = phases_of(question, phase)
            text = described_phases(of_denoiser, columns())
    show(found.to_dict() if as_json else text)


def phases_of(question: Question, phase: str) -> "PhaseEstimates":
    """The phases of training a diffusion model. Raises `InputError` for an unknown one, or another model."""
    from tightfit.cli.subject import subject_of
    from tightfit.models.diffusion_parts import parts_of
    from tightfit.models.diffusion_phases import PHASES, estimate_phases
    from tightfit.models.published import find_published

    name = question.model or ""
    parts = parts_of(find_published(name) if name else None, name)
    phases = _named(phase, PHASES)
    subject = subject_of(question, dry=True)
    batch = subject.batch
    assert isinstance(batch, dict), "a denoiser has a batch by names"
    return estimate_phases(
        subject.model,
        batch,
        parts,
        subject.estimate(),
        phases=phases,
        precision=subject.asked.step.precision,
        device=subject.asked.step.device,
    )


def policy_phases_of(question: Question, phase: str) -> "PolicyPhases":
    """The phases of a training on rewards. Raises `InputError` for an unknown one, or another objective."""
    from tightfit.cli.subject import subject_of
    from tightfit.training.grpo import PHASES, estimate_policy_phases

    subject = subject_of(question, dry=True)
    config = subject.config
    assert config is not None, "the question has a CONFIG"
    if config.training.objective != "grpo":
        raise InputError(
            f"--phase {phase}: {question.config} has training.objective {config.training.objective}; of CONFIGs those "
            "with grpo have phases: leave it out"
        )
    phases = _named(phase, PHASES)
    found = estimate_policy_phases(subject.model, config, subject.asked.device)
    return replace(found, peak_bytes={name: peak for name, peak in found.peak_bytes.items() if name in phases})


def _named(phase: str, known: Sequence[str]) -> Sequence[str]:
    if phase not in (*known, "all"):
        raise InputError(f"--phase {phase}: known are {', '.join(known)}, and all")
    return known if phase == "all" else (phase,)


def described_policy_phases(found: "PolicyPhases", width: int) -> str:
    """One table of the phases of a training on rewards."""
    from tightfit.planner.report.terminal import rendered, table_of
    from tightfit.units import format_bytes

    table = table_of("phase", "peak", "of the device")
    for name, peak in found.peak_bytes.items():
        fits = "" if peak <= found.device_bytes else ", does not fit"
        table.add_row(name.replace("_", " "), format_bytes(peak), f"{peak / found.device_bytes:.1%}{fits}")
    at_once = f"{found.drawn_at_once} completions are drawn at once, for prompts of the full length, {found.device}."
    return rendered(at_once, "", table, width=width)


def described_phases(found: "PhaseEstimates", width: int) -> str:
    """One table of the phases."""
    from tightfit.planner.report.terminal import rendered, table_of
    from tightfit.units import format_bytes

    table = table_of("phase", "VAE and text encoders", "peak", "of the device", texts=("VAE and text encoders",))
    for row in found.rows:
        share = f"{row.peak_bytes / found.device_bytes:.1%}{'' if row.fits else ', does not fit'}"
        table.add_row(row.phase, row.parts, format_bytes(row.peak_bytes), share)
    texts = " + ".join(map(format_bytes, found.encoder_bytes))
    return rendered(
        f"VAE {format_bytes(found.vae_bytes)}, text encoders {texts}, {found.device}.",
        "",
        table,
        "",
        "resident: on the device all the time, encoding in each step; offloaded: on the host but for the one that "
        "runs; gone: what they make is cached, and sampling keeps the VAE.",
        width=width,
    )


def show_inference(question: Question, new_tokens: int | None, as_json: bool, png: Path | None) -> None:
    """Answer `estimate --inference`."""
    with seldom_collecting(), Waiting() as waiting:
        from tightfit.planner.any_code.describe import describe_generation
        from tightfit.planner.report.picture import memory_picture

        waiting("running prompt and generation dry")
        found = inferred(question, new_tokens)
        write("picture", lambda path: path.write_bytes(memory_picture(found.figures, None)), png)
    show(dict(found.to_dict()) if as_json else describe_generation(found, columns()))


@options.asking({**options.OF_A_PLAN, **options.OF_RANKS})
def plan(
    question: Question,
    maximise: options.Maximise = None,
    multiple_of: options.MultipleOf = None,
    as_json: options.Json = False,
    curve: options.Curve = False,
    html: options.Html = None,
    png: options.Png = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan there too, as JSON.", rich_help_panel=options.THE_ANSWER),
    ] = None,
) -> None:
    """Find the fastest way to run a training step within a memory budget.

    The budget is the true peak of a step: parameters, gradients, optimizer
    states, activations, all of it. Where nothing fits (exit code 3), the
    answer is the least that does.

    [dim]tightfit plan examples/quickstart.yaml memory.budget=0.4x[/]

    [dim]tightfit plan --model cpu26 --batch-size 4 --seq-len 256 --budget 0.65x[/]

    [dim]tightfit plan examples/quickstart.yaml --curve --html report.html[/]

    [dim]tightfit plan --model mm26 --budget 2GB --maximise sequence_length[/]

    [dim]tightfit plan --model llama-3.1-8b --precision bf16 --device h100 --world-size 8 --budget 80%[/]
    """
    if maximise is not None and question.world_size is not None:
        raise InputError("--maximise is of one process, and --world-size is given: leave one out")
    if multiple_of is not None and maximise is None:
        raise InputError("--multiple-of is for --maximise, which is not given: give both, or neither")
    from tightfit.planner.report.plan_tables import describe_plan

    if maximise is not None and question.config is None and question.levers is None:
        question = replace(question, levers=LEVERS)
    check_budget(question)
    largest, levers = None, None
    with seldom_collecting(), Waiting() as waiting:
        from tightfit.cli.maximising import maximised
        from tightfit.cli.subject import subject_of

        waiting("looking for the fastest plan")
        if maximise is not None:
            question, largest, levers = maximised(question, maximise, multiple_of, waiting)
        if largest is None or curve or html is not None:
            draws = curve or (html is not None and question.world_size is None)  # a plan of ranks has no curve
            again = subject_of(question, dry=True, notice=say if largest is None else unsaid)
            found = planned(again, curve=draws)
        else:
            found = largest.plan
        write("plan", found.to_json, output)
        write("page", found.to_html, html)
        write("picture", found.to_png, png)
    if as_json:
        show(found.to_dict() if largest is None else replace(largest, plan=found).to_dict())
    else:
        head = [] if largest is None else [largest.sentence, *maximised_with(question, found, levers), ""]
        show("\n".join([*head, describe_plan(found, columns())]))


def maximised_with(question: Question, found: "Plan", levers: str | Sequence[str] | frozenset[str] | None) -> list[str]:
    """How the largest one was found, since other weights and levers have other ones; and where those stand."""
    names = "exact" if levers is None else levers if isinstance(levers, str) else ", ".join(levers)
    lines = [question.as_settings(), f"With {found.weights} weights, {found.optimizer}, levers {names}."]
    if question.model is not None:
        device = "" if question.device is None else f" --device {question.device}"
        lines.append(f"Other weights, adapters and optimizers: tightfit fit --model {question.model}{device}")
    return lines


@options.asking(options.OF_A_PLAN)
def verify(
    question: Question,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="A plan that `plan --output` wrote, instead of --budget.",
            rich_help_panel=options.THE_BUDGET,
        ),
    ] = None,
) -> None:
    """Prove that a plan leaves the loss, every gradient, every buffer and the random state as they were.

    The step runs here, plain and planned: the model must fit this machine.
    Where the two differ (exit code 4), the answer names the lever, the
    module and the worst parameter.

    [dim]tightfit verify examples/quickstart.yaml[/]

    [dim]tightfit verify --model ./SmolLM2-135M --seq-len 256 --plan plan.json[/]
    """
    from tightfit.cli.subject import subject_of
    from tightfit.planner.plans import Plan

    if plan_file is not None and question.budget is not None:
        raise InputError("--plan and --budget are both given: keep one of them")
    if plan_file is None:
        check_budget(question)
    given = None if plan_file is None else Plan.from_json(plan_file)
    subject = subject_of(question, dry=False)
    report = subject.verify(given or planned(subject))
    if not report.ok:
        raise VerificationFailed(str(report))
    show(str(report))


def check_budget(question: Question) -> None:
    """Raise `BudgetError` for a --model without a budget, before it is built. A CONFIG may hold one."""
    if question.model is not None and question.budget is None:
        raise BudgetError(NO_BUDGET)


def planned(subject: "Subject", *, curve: bool = False) -> "Plan":
    """A plan for the subject's budget."""
    from tightfit.cli.subject import budget_of

    return subject.plan(budget_of(subject), curve=curve)


def write(what: str, to_file: Callable[[Path], Any], path: Path | None) -> None:
    """Write an answer to a file, if one was asked for. Raises `OutputError`."""
    if path is None:
        return
    try:
        to_file(path)
    except OSError as error:
        raise OutputError(f"{path}: the {what} cannot be written: {error.strerror}") from error


def show(answer: str | dict[str, Any] | list[Any]) -> None:
    """Text as it is, anything else as JSON."""
    typer.echo(answer if isinstance(answer, str) else json.dumps(answer, indent=1))


def columns() -> int:
    """How wide tables may be: the terminal's width, within reason."""
    return min(max(shutil.get_terminal_size((WIDEST, 24)).columns, NARROWEST), WIDEST)


def show_report(report: "CompressionReport", as_json: bool, png: Path | None) -> None:
    """The report of a compression, on the terminal or as JSON, and its picture."""
    from tightfit.models.compress.report import describe_report

    write("picture", report.to_png, png)
    show(report.to_dict() if as_json else describe_report(report, columns()))
