"""Answers a question of the page, part by part: the plain step first, then the plan, the curve and the recipes.

Runs in a worker process. What it yields is plain data, so the process of the page needs no torch.
"""

import traceback
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

import tightfit
from tightfit.errors import CannotFit, InputError, ModelError, TightfitError
from tightfit.explorer.messages import Failure, Refusal
from tightfit.explorer.question import PageQuestion
from tightfit.explorer.uploads import Described, Upload, read_upload
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.models.pretrained import build_described
from tightfit.models.variants import as_recipe
from tightfit.planner.api import as_plan
from tightfit.planner.asked import Asked
from tightfit.planner.estimates import make_estimate
from tightfit.planner.outcome import CurveRecord, EstimateRecord, PlanRecord
from tightfit.planner.search.search import Search
from tightfit.planner.search.tradeoff import Tradeoff
from tightfit.recipes.records import RecipesRecord
from tightfit.runtime.activity import aside
from tightfit.step import TokenBatch
from tightfit.tracing.build import build_dry
from tightfit.tracing.twin import real_tensors

SEED = 0  # of new weights, which have no memory
PACKAGE = Path(tightfit.__file__).parent


Part = EstimateRecord | PlanRecord | CurveRecord | RecipesRecord | Refusal


def parts_of(question: PageQuestion) -> Iterator[Part]:
    """The parts of an answer, as each is known. Raises `TightfitError`."""
    described = question.described
    model = build(described)
    try:
        yield from _parts(question, model)
    except TightfitError:
        raise
    except Exception as error:
        if not _came_from_elsewhere(error):
            raise
        raise ModelError(f"{described.name} rejects the batch: {type(error).__name__}: {error}") from error


def build(described: Described) -> nn.Module:
    """A model without weights. Raises `ModelError`."""
    if described.decoder is not None:
        section = described.decoder
        return build_dry(lambda: build_model(section, seed=SEED))
    assert described.fields is not None, "a model is described by either of the two"
    fields_of_it = described.fields
    return build_dry(lambda: build_described(described.name, fields_of_it).train())


def _parts(question: PageQuestion, model: nn.Module) -> Iterator[Part]:
    asked = asked_of(question, model)
    with aside(), real_tensors():
        request = asked.request()
        yield plain_data(EstimateRecord, make_estimate(request))
        search = Search(request, question.budget)
        try:
            yield plain_data(PlanRecord, as_plan(search, search.run()))
        except CannotFit as error:
            yield Refusal(str(error), error.least_bytes, ways_out(error))
        yield plain_data(CurveRecord, Tradeoff(search).curve())
    yield from recipes(question, model)  # last: they take the longest


def asked_of(question: PageQuestion, model: nn.Module) -> Asked:
    """The arguments of a plan for the question. Raises `InputError`."""
    limit = position_limit(model)
    if limit is not None and question.sequence_length > limit:
        raise InputError(
            f"sequence {question.sequence_length:,} is longer than the model's {limit:,} positions: lower it"
        )
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        raise ModelError(f"{type(model).__name__} has no embedding to make token ids for: choose a language model")
    return Asked(
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


def recipes(question: PageQuestion, model: nn.Module) -> Iterator[RecipesRecord]:
    """What fits the card, best first; nothing where this version has no `tightfit.fit`."""
    search = getattr(tightfit, "fit", None)
    if search is None:
        return
    vocabulary = vocabulary_size(model)
    assert vocabulary is not None, "the plan has asked"
    batch = TokenBatch(question.batch_size, question.sequence_length, vocabulary)
    yield plain_data(
        RecipesRecord, search(model, batch, device=question.device, budget=question.budget, levers=question.allowed)
    )


def plain_data(kind: type[Any], found: Any) -> Any:
    """A result as the record that it extends, which another process reads without torch."""
    return kind(**{each.name: getattr(found, each.name) for each in fields(kind)})


def answered(request: PageQuestion | Upload) -> Iterator[Any]:
    """The parts of an answer, or of a reading of an upload; at the end a `Failure` if there is no (further) one."""
    try:
        if isinstance(request, Upload):
            yield read_upload(request)
        else:
            yield from parts_of(request)
    except TightfitError as error:
        yield Failure(line_of(error))
    except MemoryError:
        yield Failure("this question needs more memory than the page may use: ask for less, or use the command line")
    except Exception as error:  # whatever a model of strangers raises, the page shows one line and goes on
        traceback.print_exc()
        yield Failure(f"this question failed: {type(error).__name__}: {line_of(error)}")


def line_of(error: BaseException) -> str:
    """An error on one line of at most 400 characters."""
    line = " ".join(str(error).split())
    return line if len(line) <= 400 else f"{line[:300]} ... {line[-80:]}"


def _came_from_elsewhere(error: BaseException) -> bool:
    """Whether the last line of ours before an exception belongs to somebody else's code, such as a model's."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return not Path(last.f_code.co_filename).is_relative_to(PACKAGE)
