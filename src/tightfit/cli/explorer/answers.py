"""Answers a question of the page, part by part: the plain step first, then the plan, the curve and the recipes.

Runs in a worker process. What it yields is plain data, so the process of the page needs no torch.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

import tightfit
from tightfit.cli.explorer.messages import NoAnswer, NoPlan, Progress
from tightfit.cli.explorer.question import PageQuestion
from tightfit.cli.explorer.uploads import Described, Upload, read_upload
from tightfit.errors import CannotFit, InputError, ModelError, TightfitError, said_by
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.models.pretrained import build_described
from tightfit.models.variants import as_recipe
from tightfit.planner.api import as_plan
from tightfit.planner.estimates import make_estimate
from tightfit.planner.outcome import CurveRecord, EstimateRecord, PlanRecord
from tightfit.planner.request import Request
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.search import Search
from tightfit.planner.search.tradeoff import Tradeoff
from tightfit.recipes.records import RecipesRecord
from tightfit.runtime.outside import outside_training
from tightfit.step import TokenBatch
from tightfit.tracing.build import build_dry
from tightfit.tracing.twin import real_tensors
from tightfit.units import is_share_of

SEED = 0  # of new weights, which have no memory
PACKAGE = Path(tightfit.__file__).parent


STEPS = 4  # estimate, plan, curve and recipes
Tell = Callable[[Progress], None]
Part = EstimateRecord | PlanRecord | CurveRecord | RecipesRecord | NoPlan


def parts_of(question: PageQuestion, tell: Tell) -> Iterator[Part]:
    """The parts of an answer, as each is known. `tell` is called with what is being done. Raises `TightfitError`."""
    described = question.described
    tell(Progress(f"Step 1 of {STEPS}: running the plain step dry"))
    model = build(described)
    try:
        yield from _parts(question, model, tell)
    except TightfitError:
        raise
    except Exception as error:
        if not _came_from_elsewhere(error):
            raise
        raise ModelError(f"{described.name} rejects the batch: {said_by(error)}") from error


def build(described: Described) -> nn.Module:
    """A model without weights. Raises `ModelError`."""
    if described.decoder is not None:
        section = described.decoder
        return build_dry(lambda: build_model(section, seed=SEED))
    assert described.fields is not None, "a model is described by either of the two"
    fields_of_it = described.fields
    return build_dry(lambda: build_described(described.name, fields_of_it).train())


def _parts(question: PageQuestion, model: nn.Module, tell: Tell) -> Iterator[Part]:
    asked = asked_of(question, model)
    with outside_training(), real_tensors():
        request = asked.checked()
        yield plain_data(EstimateRecord, make_estimate(request))
        tell(Progress(f"Step 2 of {STEPS}: looking for the fastest plan that fits"))
        search = Search(request, question.budget)
        try:
            yield plain_data(PlanRecord, as_plan(search, fastest(search)))
        except CannotFit as error:
            yield NoPlan(str(error), error.least_bytes, ways_out(error))
        tell(Progress(f"Step 3 of {STEPS}: planning for other budgets"))
        yield plain_data(CurveRecord, Tradeoff(search).curve())
    budget: int | str = question.budget
    if is_share_of(budget, "x"):  # of this step's plain peak, which is not that of another recipe
        budget = search.budget_bytes
    yield from recipes(question, model, budget, tell)  # last: they take the longest


def asked_of(question: PageQuestion, model: nn.Module) -> Request:
    """The arguments of a plan for the question. Raises `InputError`."""
    limit = position_limit(model)
    if limit is not None and question.sequence_length > limit:
        raise InputError(
            f"sequence {question.sequence_length:,} is longer than the model's {limit:,} positions: lower it"
        )
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        raise ModelError(f"{type(model).__name__} has no embedding to make token ids for: choose a language model")
    return Request.of(
        model=as_recipe(model, dtype=question.dtype, adapter=question.adapter),  # pyright: ignore[reportArgumentType] - checked
        batch=TokenBatch(question.batch_size, question.sequence_length, vocabulary),
        optimizer=question.optimizer,
        precision=question.precision,  # pyright: ignore[reportArgumentType] - checked by the question
        device=question.device,
        step_in_backward=question.step_in_backward,
        levers=question.allowed,
    )


def ways_out(error: CannotFit) -> tuple[str, ...]:
    """The ways out of a refusal, as lines; none where the planner gives none."""
    return tuple(str(way) for way in getattr(error, "ways_out", ()))


def recipes(question: PageQuestion, model: nn.Module, budget: int | str, tell: Tell) -> Iterator[RecipesRecord]:
    """The recipes that fit the card, best first; nothing where this version has no `tightfit.fit`."""
    search = getattr(tightfit, "fit", None)
    if search is None:
        return
    vocabulary = vocabulary_size(model)
    assert vocabulary is not None, "the plan has asked"
    batch = TokenBatch(question.batch_size, question.sequence_length, vocabulary)
    tell(Progress(f"Step 4 of {STEPS}: trying recipes"))
    found = search(
        model,
        batch,
        device=question.device,
        budget=budget,
        levers=question.allowed,
        notice=lambda line: tell(Progress(f"Step 4 of {STEPS}: {line}")),
    )
    outcomes = tuple(replace(outcome, plan=None) for outcome in found.outcomes)  # plans are read with torch
    yield replace(plain_data(RecipesRecord, found), outcomes=outcomes)


def plain_data(kind: type[Any], found: Any) -> Any:
    """A result as the record that it extends, which another process reads without torch."""
    return kind(**{each.name: getattr(found, each.name) for each in fields(kind)})


def answered(request: PageQuestion | Upload, tell: Tell = lambda said: None) -> Iterator[Any]:
    """The parts of an answer, or of a reading of an upload; at the end a `NoAnswer` if there is no (further) one.

    `tell` is called with a `Progress` when something else is being done.
    """
    try:
        if isinstance(request, Upload):
            yield read_upload(request)
        else:
            yield from parts_of(request, tell)
    except TightfitError as error:
        yield NoAnswer(line_of(error))
    except MemoryError:
        yield NoAnswer("this question needs more memory than the page may use: ask for less, or use the command line")
    except Exception as error:  # whatever a model of strangers raises, the page shows one line and goes on
        traceback.print_exc()
        yield NoAnswer(f"this question failed: {type(error).__name__}: {line_of(error)}")


def line_of(error: BaseException) -> str:
    """An error on one line of at most 400 characters."""
    line = " ".join(str(error).split())
    return line if len(line) <= 400 else f"{line[:300]} ... {line[-80:]}"


def _came_from_elsewhere(error: BaseException) -> bool:
    """True if the last line of ours before an exception belongs to somebody else's code, such as a model's."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return not Path(last.f_code.co_filename).is_relative_to(PACKAGE)
