"""Remedies with their real price: the same step, run dry with each lever on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tightfit.activity import aside
from tightfit.doctor.diagnosis import Remedy
from tightfit.errors import CannotFit, LeverError
from tightfit.levers.recompute import RECOMPUTE_ALL, Policy
from tightfit.planner.blocks import find_blocks, globs_of
from tightfit.planner.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.head import find_head
from tightfit.planner.records import ChunkedLoss
from tightfit.planner.request import ROUNDING_LEVERS, Combination, Request, Tracer
from tightfit.planner.search import Search
from tightfit.trace.record import StepTrace
from tightfit.units import format_bytes

SPLITS = (2, 4)  # micro-batches that are tried, times those that there are


@dataclass(frozen=True)
class Priced:
    """The plain step, the remedies in their order, and what could not be tried, in sentences."""

    plain: StepTrace
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Trial:
    """One way to run the step, to be priced."""

    name: str
    exactness: str
    combination: Combination
    policies: Mapping[str, Policy]
    python: str
    yaml: str
    precision: str | None = None
    needs_budget: bool = False  # its lines say the peak that it reaches


@aside()
def priced_remedies(request: Request, limit_bytes: int | None) -> Priced:
    """Run the step dry as it is, and with each remedy.

    Where `limit_bytes` is known, those that fit come first, the quickest at the head (what changes the numerics after
    all others); and the best plan for it is among them. The rest, and all where no limit is known, go by the bytes that
    they save.
    """
    plain = Tracer(request).whole(Combination(request.micro_batches), {})
    remedies, notes = [], []
    for trial in _trials(request, plain):
        try:
            trace = _traced(request, trial)
        except LeverError as error:
            notes.append(f"{trial.name} was not tried: {error}.")
            continue
        remedies.append(_remedy(trial, trace, plain, limit_bytes))
    if limit_bytes is not None and plain.peak_bytes + UNSEEN_BYTES > limit_bytes:
        try:
            remedies.append(_planned(request, plain, limit_bytes))
        except CannotFit as error:
            notes.append(f"No plan of exact levers fits: {error}.")
    return Priced(plain, tuple(sorted(remedies, key=_rank)), tuple(notes))


def _rank(remedy: Remedy) -> tuple[bool, bool, float]:
    """Of those that fit, what leaves the numerics as they are goes first."""
    if remedy.fits:
        return False, remedy.exactness == "inexact", remedy.added_seconds or 0.0
    return True, False, -(remedy.saved_bytes or 0)


def _trials(request: Request, plain: StepTrace) -> Iterator[_Trial]:
    paths = find_blocks(request.model, request.blocks)
    head = find_head(plain, request.model)
    loss = None if head is None else ChunkedLoss(head, None)
    split = [n for n in (request.micro_batches * k for k in SPLITS) if request.size % n == 0]
    now = Combination(request.micro_batches)
    if paths:
        yield _recompute(now, paths)
    if loss is not None:
        yield _chunked_loss(replace(now, chunked_loss=loss))
    yield from (_micro_batches(Combination(n)) for n in split)
    if request.settings.precision == "fp32":
        yield _bf16(now, request.device.kind)
    if len([part for part in (paths, loss, split) if part]) > 1:
        yield _all_together(Combination(max(split, default=request.micro_batches), loss), paths)


def _recompute(combination: Combination, paths: Sequence[str]) -> _Trial:
    globs = globs_of(paths)
    return _Trial(
        f"recompute all {len(paths)} blocks",
        "exact",
        combination,
        dict.fromkeys(paths, RECOMPUTE_ALL),
        "; ".join(f'tightfit.recompute(model, "{glob}")' for glob in globs),
        f'memory: {{recompute: {{blocks: "{globs[0]}"}}}}' if len(globs) == 1 else "memory: {recompute: {}}",
    )


def _chunked_loss(combination: Combination) -> _Trial:
    return _Trial(
        "chunked loss",
        "rounding",
        combination,
        {},
        'tightfit.plan(model, batch, "BUDGET", levers=["chunked_loss"]).apply(model)',
        "memory: {budget: BUDGET, levers: [chunked_loss]}",
        needs_budget=True,
    )


def _micro_batches(combination: Combination) -> _Trial:
    count = combination.micro_batches
    return _Trial(
        f"{count} micro-batches",
        "rounding",
        combination,
        {},
        'tightfit.plan(model, batch, "BUDGET", levers=["micro_batch"]).apply(model).backward(batch)',
        f"training: {{gradient_accumulation_steps: {count}}}",
        needs_budget=True,
    )


def _bf16(combination: Combination, device: str) -> _Trial:
    python = f'with torch.autocast("{device}", torch.bfloat16):'
    return _Trial("autocast to bf16", "inexact", combination, {}, python, "training: {precision: bf16}", "bf16")


def _all_together(combination: Combination, paths: Sequence[str]) -> _Trial:
    policies = dict.fromkeys(paths, RECOMPUTE_ALL)
    return _Trial(
        f"all of it: {combination}" + (", all blocks recomputed" if paths else ""),
        "rounding",
        combination,
        policies,
        'tightfit.plan(model, batch, "BUDGET", levers="rounding").apply(model).backward(batch)',
        "memory: {budget: BUDGET, levers: rounding}",
        needs_budget=True,
    )


def _traced(request: Request, trial: _Trial) -> StepTrace:
    if trial.precision is not None:
        request = replace(request, settings=replace(request.settings, precision=trial.precision))
    return Tracer(request).whole(trial.combination, trial.policies)


def _remedy(trial: _Trial, trace: StepTrace, plain: StepTrace, limit_bytes: int | None) -> Remedy:
    needed = trace.peak_bytes + UNSEEN_BYTES
    budget = _rounded_up(needed)
    return Remedy(
        name=trial.name,
        exactness=trial.exactness,
        python=trial.python.replace("BUDGET", budget) if trial.needs_budget else trial.python,
        yaml=trial.yaml.replace("BUDGET", budget),
        saved_bytes=plain.peak_bytes - trace.peak_bytes,
        added_seconds=trace.step_seconds - plain.step_seconds,
        peak_bytes=trace.peak_bytes,
        fits=None if limit_bytes is None else needed <= limit_bytes,
    )


def _rounded_up(size: int) -> str:
    """A budget that a person may write and that is not below the size."""
    return f"{-(-size // 2**20)}MiB"


def _planned(request: Request, plain: StepTrace, limit_bytes: int) -> Remedy:
    """The quickest plan within the limit."""
    search = Search(replace(request, levers=frozenset(ROUNDING_LEVERS)), limit_bytes)
    found: Candidate = search.run()
    budget = f"{limit_bytes // 2**20}MiB"
    return Remedy(
        name=f"a plan for {format_bytes(limit_bytes)}: {search.in_words(found)}",
        exactness="exact" if str(found.combination) == str(Combination(request.micro_batches)) else "rounding",
        python=f'tightfit.plan(model, batch, "{budget}", levers="rounding").apply(model).backward(batch)',
        yaml=f"memory: {{budget: {budget}, levers: rounding}}",
        saved_bytes=plain.peak_bytes - found.peak_bytes,
        added_seconds=found.seconds - plain.step_seconds,
        peak_bytes=found.peak_bytes,
        fits=True,
    )
