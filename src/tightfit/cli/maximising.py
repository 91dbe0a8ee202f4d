"""`plan --maximise`: the largest batch, sequence or model for a budget, and the question with it put in."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tightfit.cli import sources
from tightfit.cli.question import Question
from tightfit.cli.subject import Subject, budget_of, built, subject_of
from tightfit.errors import InputError, TightfitError
from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.loading import position_limit
from tightfit.planner.search.largest import Largest, maximise
from tightfit.step import Batch
from tightfit.training.config import load_config

TOKENS = 64  # a sequence length that matrix units like
WIDTH = 64  # and a width
Levers = str | Sequence[str] | frozenset[str] | None


@dataclass(frozen=True)
class MaximisedValue:
    """A value that can be maximised for one question: how a value is put in, which values there are, and up to
    where.
    """

    put: Callable[[int], Question]
    multiple_of: int
    at_most: int | None = None


def maximised(
    question: Question, what: str, multiple_of: int | None, notice: Callable[[str], None]
) -> tuple[Question, Largest, Levers]:
    """The question with the largest value of `what` put in, what was found, and the levers that were allowed.

    Raises `InputError`, `BudgetError`, `CannotFit`.
    """
    if what not in DIMENSIONS:
        raise InputError(f"--maximise {what!r} is not known: choose one of {', '.join(DIMENSIONS)}")
    first = subject_of(question, dry=True)
    dimension = DIMENSIONS[what](question, first)
    latest = [first]

    def case(value: int) -> tuple[nn.Module, Batch]:
        latest[0] = built(dimension.put(value), dry=True)
        return latest[0].model, latest[0].batch

    try:
        found = maximise(
            case,
            budget_of(first),
            what=what,
            multiple_of=multiple_of or dimension.multiple_of,
            at_most=dimension.at_most,
            notice=notice,
            **first.asked.how,
        )
    except TightfitError:
        raise
    except Exception:
        with latest[0].rejections():
            raise
    found = replace(found, plan=replace(found.plan, optimizer=first.optimizer))
    return dimension.put(found.value), found, first.asked.levers_named


def _batch_size(question: Question, subject: Subject) -> MaximisedValue:
    return MaximisedValue(lambda n: replace(question, batch_size=n), subject.asked.micro_batches)


def _sequence_length(question: Question, subject: Subject) -> MaximisedValue:
    """The reference decoder's table of rotations grows with the sequence; other models have the positions they have."""
    decoder = _decoder(question)
    if decoder is None:
        return MaximisedValue(lambda n: replace(question, seq_len=n), TOKENS, position_limit(subject.model))
    positions = decoder.max_position_embeddings

    def put(length: int) -> Question:
        shape: dict[str, Any] = {"max_position_embeddings": length} if length > positions else {}
        return replace(question, seq_len=length, shape=shape)

    return MaximisedValue(put, TOKENS)


def _hidden_size(question: Question, subject: Subject) -> MaximisedValue:
    decoder = _decoder(question)
    if decoder is None:
        raise InputError(
            f"--maximise hidden_size is for the reference decoder (a preset, or a CONFIG without model.path), not for "
            f"{subject.name}: in Python, tightfit.maximise takes a function that builds a model for a size"
        )
    heads = 1 if decoder.head_dim is not None else 2 * decoder.num_heads  # a head has pairs to rotate
    return MaximisedValue(lambda n: replace(question, shape={"hidden_size": n}), math.lcm(WIDTH, heads))


DIMENSIONS: Mapping[str, Callable[[Question, Subject], MaximisedValue]] = {
    "sequence_length": _sequence_length,
    "batch_size": _batch_size,
    "hidden_size": _hidden_size,
}


def _decoder(question: Question) -> DecoderConfig | None:
    """The shape of the reference decoder that is asked about, if it is one."""
    if question.config is not None:
        section = load_config(question.config, question.settings).model
    else:
        assert question.model is not None, "the question has a --model"
        section = sources.described(question.model)
    return section if isinstance(section, DecoderConfig) else None
