"""Prices remedies: runs the same step dry with each lever."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tightfit.errors import CannotFit, CompileError, DeviceError, InputError, LeverError, ModelError
from tightfit.levers.recompute import Policy
from tightfit.memory.allocator import old_objects_left_alone
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import Combination, Exactness, Role, Suggestion, allowed_levers, lever_types
from tightfit.planner.request import Request, Tracer, plain_step
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.search import Search
from tightfit.recipes import neighbours
from tightfit.recipes.choices import installed
from tightfit.recipes.lines import change_in_words, sections_for, statements_for, yaml_of
from tightfit.recipes.variants import Models, changed_to
from tightfit.recipes.ways import Remedy
from tightfit.runtime.outside import outside_training
from tightfit.tracing.record import StepTrace
from tightfit.units import format_bytes


@dataclass(frozen=True)
class PricedRemedies:
    """The plain step, the ranked remedies, and sentences about remedies that could not be tried."""

    plain: StepTrace
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Trial:
    """One way to run the step, to be priced."""

    name: str
    exactness: str
    request: Request
    combination: Combination
    inside: Policy | None  # the policy of every block
    python: str
    yaml: str


@outside_training()
@old_objects_left_alone()
def priced_remedies(request: Request, limit_bytes: int | None) -> PricedRemedies:
    """Run the step dry without and with each remedy, and rank the remedies.

    If `limit_bytes` is known, remedies that fit come first, the fastest at the head; those that change the numerics
    come after the others. The best plan for the limit is one of them. All other remedies are ranked by the bytes they
    save.
    """
    plain = Tracer(request).whole(request.plain, {})
    remedies: list[Remedy] = []
    notes: list[str] = []
    for trial in _trials(request, plain, notes):
        try:
            trace = _traced(trial)
        except (LeverError, DeviceError, CompileError, InputError) as error:
            notes.append(f"{trial.name} was not tried: {error}.")
            continue
        if trace.peak_bytes < plain.peak_bytes:
            remedies.append(_remedy(trial, trace, plain, limit_bytes))
    if limit_bytes is not None and plain.peak_bytes + UNSEEN_BYTES > limit_bytes:
        try:
            remedies.append(_planned(request, plain, limit_bytes))
        except CannotFit as error:
            notes.append(f"No plan of exact levers fits: {error}.")
    return PricedRemedies(plain, tuple(sorted(remedies, key=_rank)), tuple(notes))


def _rank(remedy: Remedy) -> tuple[bool, bool, float]:
    """The sort key of a remedy. Among those that fit, inexact ones come last."""
    if remedy.fits:
        return False, remedy.exactness == "inexact", remedy.added_seconds or 0.0
    return True, False, -(remedy.saved_bytes or 0)


def _trials(request: Request, plain: StepTrace, notes: list[str]) -> Iterator[_Trial]:
    """Each lever alone, the levers of the class "rounding" together, then other recipes.

    `notes` gets a sentence for each remedy that cannot be set up.
    """
    paths = tuple(find_blocks(request.model, request.blocks))
    step = plain_step(request, plain, paths)
    kinds = [kind for kind in lever_types() if kind.refusal(request.device) is None]
    together: list[Suggestion] = []
    for kind in kinds:
        suggestions = kind.suggestions(step)
        for suggestion in suggestions:
            asked = request.but(levers=frozenset((kind.name,)))
            combination = request.plain.with_lever(suggestion.lever)
            lines = suggestion.python, suggestion.yaml
            yield _Trial(suggestion.name, kind.exactness, asked, combination, suggestion.inside, *lines)
        if kind.role in (Role.INSIDE_BLOCKS, Role.COMBINED) and kind.name in allowed_levers("rounding"):
            together += suggestions[-1:]
    if len(together) > 1:
        yield _all_together(request, together, paths)
    yield from _recipes(request, notes)


def _all_together(request: Request, suggestions: Sequence[Suggestion], paths: Sequence[str]) -> _Trial:
    combination = request.plain
    for suggestion in suggestions:
        combination = combination.with_lever(suggestion.lever)
    inside = next((suggestion.inside for suggestion in suggestions if suggestion.inside is not None), None)
    return _Trial(
        f"all of it: {combination}" + (", all blocks recomputed" if inside and paths else ""),
        Exactness.ROUNDING,
        request,
        combination,
        inside,
        'tightfit.plan(model, batch, "BUDGET", levers="rounding").apply(model).backward(batch)',
        "memory: {budget: BUDGET, levers: rounding}",
    )


def _recipes(request: Request, notes: list[str]) -> Iterator[_Trial]:
    """Recipes near that of the step: other optimizers, autocast, 16-bit weights, low-rank adapters."""
    before = neighbours.recipe_of(request)
    cast, stepping = neighbours.autocast(request, before), neighbours.in_backward(request, before)
    found = [each for each in (cast, stepping) if each is not None]
    found += neighbours.frugal_optimizers(request, before)
    found += neighbours.narrow_weights(request, before)[:1]
    found += installed(neighbours.adapted(request, before))[:1]
    models = Models(request.model)
    for recipe in found:
        words = ", ".join(change_in_words(before, recipe))
        try:
            variant = changed_to(request, before, recipe, models)
        except ModelError as error:
            notes.append(f"{words} was not tried: {error}.")
            continue
        python = "; ".join(statements_for(before, recipe))
        if recipe == cast:
            python = f'with torch.autocast("{request.device.kind}", torch.bfloat16):'
        sections = yaml_of(sections_for(before, recipe)).splitlines()
        yaml = sections[0] if len(sections) == 1 else f"{{{', '.join(sections)}}}"
        exactness = Exactness.EXACT if recipe.changed == before.changed else Exactness.INEXACT
        yield _Trial(words, exactness, variant, variant.plain, None, python, yaml)


def _traced(trial: _Trial) -> StepTrace:
    paths = find_blocks(trial.request.model, trial.request.blocks) if trial.inside is not None else []
    policies = {} if trial.inside is None else dict.fromkeys(paths, trial.inside)
    return Tracer(trial.request).whole(trial.combination, policies)


def _remedy(trial: _Trial, trace: StepTrace, plain: StepTrace, limit_bytes: int | None) -> Remedy:
    needed = trace.peak_bytes + UNSEEN_BYTES
    budget = _rounded_up(needed)
    return Remedy(
        name=trial.name,
        exactness=trial.exactness,
        python=trial.python.replace("BUDGET", budget),
        yaml=trial.yaml.replace("BUDGET", budget),
        saved_bytes=plain.peak_bytes - trace.peak_bytes,
        added_seconds=trace.step_seconds - plain.step_seconds,
        peak_bytes=trace.peak_bytes,
        fits=None if limit_bytes is None else needed <= limit_bytes,
    )


def _rounded_up(size: int) -> str:
    """A budget of at least `size` bytes, as a person would write it."""
    return f"{-(-size // 2**20)}MiB"


def _planned(request: Request, plain: StepTrace, limit_bytes: int) -> Remedy:
    """The fastest plan within the limit."""
    search = Search(request.but(levers=allowed_levers("rounding")), limit_bytes)
    found: Candidate = fastest(search)
    budget = f"{limit_bytes // 2**20}MiB"
    return Remedy(
        name=f"a plan for {format_bytes(limit_bytes)}: {search.in_words(found)}",
        exactness="exact" if found.combination == request.plain else "rounding",
        python=f'tightfit.plan(model, batch, "{budget}", levers="rounding").apply(model).backward(batch)',
        yaml=f"memory: {{budget: {budget}, levers: rounding}}",
        saved_bytes=plain.peak_bytes - found.peak_bytes,
        added_seconds=found.seconds - plain.step_seconds,
        peak_bytes=found.peak_bytes,
        fits=True,
    )
