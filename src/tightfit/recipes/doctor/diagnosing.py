"""`tightfit.diagnose`: explains an error, a trace or a file's content, and prices remedies."""

from dataclasses import replace
from functools import partial, singledispatch
from typing import Any

from torch import nn

from tightfit.errors import InputError
from tightfit.memory.failure import parse_out_of_memory
from tightfit.memory.snapshot import Snapshot, snapshot_of
from tightfit.planner.estimates import Estimate
from tightfit.planner.plans import Plan
from tightfit.planner.records import StepFigures
from tightfit.planner.request import Request
from tightfit.planner.step_figures import step_figures
from tightfit.recipes.doctor import symptoms
from tightfit.recipes.doctor.describe import Diagnosis
from tightfit.recipes.remedies import priced_remedies
from tightfit.step import Batch, Loss, Optimizer, Precision, Step
from tightfit.tracing.record import StepTrace
from tightfit.training.monitoring.record import Record
from tightfit.training.monitoring.watch import Monitor
from tightfit.training.monitoring.where import place_of_error
from tightfit.units import format_bytes

ASK_PYTHON = "For remedies with their price: tightfit.diagnose(..., model=model, batch=batch)."
ASK_COMMAND = "For remedies with their price: tightfit doctor FILE CONFIG, or --model with --batch-size and --seq-len."
SAME_PARAMETERS = 0.02  # a part of them: tied weights and the allocator's rounding are less
WATCH = "To see which module and category: tightfit profile SCRIPT, then tightfit doctor on the record that it writes."


def diagnose(
    error_or_trace: Any,
    *,
    model: nn.Module | None = None,
    batch: Batch | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    device: Any = None,
    micro_batches: int = 1,
    grad_clip: float | None = None,
    step_in_backward: bool = False,
) -> Diagnosis:
    """Explain why memory ran out, or what uses it: phase, module and category of the peak, and remedies.

    Args:
        error_or_trace: An exception (an out-of-memory error of CUDA, the CPU or MPS), a `StepTrace`, an `Estimate`, a
            `Plan`, a `Monitor` or its `Record`, or the result of `torch.cuda.memory._snapshot()`.
        model: With a model and a batch the step runs dry, without and with each remedy. Each remedy then has the bytes
            that it saves and the seconds that it costs.
        batch: As for `tightfit.estimate`, like the arguments that follow.

    Returns:
        The diagnosis, with remedies ranked.

    Raises:
        InputError: The subject is something else.

    Example:
        >>> import tightfit
        >>> from tightfit.models.decoder import Decoder
        >>> from tightfit.models.decoder_config import DecoderConfig
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64))
        >>> batch = tightfit.TokenBatch(size=8, length=64, vocab_size=64)
        >>> found = tightfit.diagnose(tightfit.estimate(model, batch))
        >>> found.peak_bytes == sum(found.by_category.values())
        True
    """
    if model is None or batch is None:
        return diagnose_asked(error_or_trace, None)
    return diagnose_asked(
        error_or_trace,
        Request(
            Step(
                model, batch, loss, optimizer, precision, device, micro_batches, grad_clip,
                step_in_backward=step_in_backward,
            )
        ),
    )  # fmt: skip


def diagnose_asked(error_or_trace: Any, asked: Request | None) -> Diagnosis:
    """`tightfit.diagnose`, with the arguments of the step as one record, if there is one."""
    found = symptoms_of(error_or_trace)
    if asked is None:
        known = () if found.by_category or found.holders else (WATCH,)
        return replace(found, advice=(*found.advice, *known, ASK_PYTHON))
    request = asked.without_levers().checked()
    priced = priced_remedies(request, found.limit_bytes)
    expected = symptoms.of_step(found.subject, step_figures(priced.plain))
    differs = _another_model(found, expected)
    if not found.by_category:
        found = replace(found, by_category=expected.by_category, holders=expected.holders, category=expected.category)
    # A subject that is itself a prediction would be compared with another prediction.
    predicted = isinstance(error_or_trace, Plan | Estimate | StepFigures | StepTrace)
    compared = () if predicted else (_compared(found, expected, request.device.name), *differs)
    return replace(
        found,
        findings=(*found.findings, *compared),
        phase=found.phase or expected.phase,
        module=found.module if found.module is not None else expected.module,
        operator=found.operator or expected.operator,
        expected_bytes=expected.peak_bytes,
        remedies=priced.remedies,
        advice=(*found.advice, *priced.notes),
    )


@singledispatch
def symptoms_of(subject: Any) -> Diagnosis:
    """The diagnosis from the subject alone. Raises `InputError` for an unknown kind of subject."""
    raise InputError(
        f"a {type(subject).__name__} cannot be diagnosed: give an out-of-memory error, a trace, an estimate, a plan, "
        "a monitor or its record, or a CUDA memory snapshot"
    )


symptoms_of.register(StepFigures, partial(symptoms.of_step, "an estimate"))
symptoms_of.register(Plan, symptoms.of_plan)
symptoms_of.register(Record, symptoms.of_record)
symptoms_of.register(Snapshot, symptoms.of_snapshot)
symptoms_of.register(symptoms.LoggedFailure, symptoms.of_log)


@symptoms_of.register
def _(subject: Estimate) -> Diagnosis:
    return symptoms.of_step("an estimate", subject.step_figures)


@symptoms_of.register
def _(subject: Monitor) -> Diagnosis:
    return symptoms.of_record(subject.record())


@symptoms_of.register
def _(subject: StepTrace) -> Diagnosis:
    if not subject.operators:
        raise InputError("the trace is empty: no operator ran in it")
    return symptoms.of_step("a traced step", step_figures(subject))


@symptoms_of.register
def _(subject: BaseException) -> Diagnosis:
    said = parse_out_of_memory(str(subject))
    if said is None:
        text = " ".join(str(subject).split())[:200]
        raise InputError(f"{type(subject).__name__} is no out-of-memory error: {text}")
    return symptoms.of_error(said, place_of_error(subject))


@symptoms_of.register
def _(subject: dict) -> Diagnosis:
    try:
        return symptoms.of_snapshot(snapshot_of(subject))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"not a CUDA memory snapshot ({type(error).__name__}: {error})") from error


def _another_model(found: Diagnosis, expected: Diagnosis) -> tuple[str, ...]:
    """A sentence where the parameters that were measured are not those of the model that was named."""
    measured, named = (each.by_category.get("parameters") for each in (found, expected))
    if not measured or not named or abs(measured - named) <= SAME_PARAMETERS * named:
        return ()
    return (
        f"The parameters differ: {format_bytes(measured)} measured, {format_bytes(named)} in the model that was named. "
        "Remedies are for the latter; name the model, dtype and adapter that ran.",
    )


def _compared(found: Diagnosis, expected: Diagnosis, device: str) -> str:
    """A sentence that compares the expected peak with the subject's own, if it has one."""
    assert expected.peak_bytes is not None, "a dry run has a peak"
    place = f"{expected.phase}, {expected.module or 'top level'}"
    line = f"A dry run of this step on {device} expects {format_bytes(expected.peak_bytes)}, in {place}"
    # The peak before an out-of-memory error is not the step's: the step did not end.
    actual = found.peak_bytes if found.requested_bytes is None else None
    if actual is None and found.limit_bytes is not None:
        over = expected.peak_bytes - found.limit_bytes
        size, relation = format_bytes(abs(over)), "more" if over > 0 else "less"
        return f"{line}: {size} {relation} than there was."
    if actual is None:
        return f"{line}."
    return f"{line}; actual {format_bytes(actual)} ({actual / expected.peak_bytes - 1:+.2%})."
