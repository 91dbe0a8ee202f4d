"""Measures the weights of micro-batches' losses in the loss of their batch, on two samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.errors import LeverError
from tightfit.integrations.batches import first_samples, is_table, stretched
from tightfit.integrations.planning import GuestStep
from tightfit.levers.micro_batch import IGNORE_INDEX, as_tensors, batch_size, split_batch, valid_tokens
from tightfit.models.mode import evaluating
from tightfit.runtime.activity import aside
from tightfit.step import AUTOCAST_DTYPES, Batch
from tightfit.tracing.restore import everything_restored

LENGTH = 16  # tokens of each sample: the measurement runs before a plan, so it must use little memory
LABELLED = ((0, 1), (1, 2, 3))  # positions of labels: 1 and 3 of them after a shift by one, 2 and 3 without
ROUNDING = 1e-5  # relative difference of fp32 losses of samples alone and together
ROUNDING_16_BIT = 5e-3


@dataclass(frozen=True)
class Weighing:
    """The weight of a micro-batch is its share of `count` over the batch. With None, losses add up without weights."""

    count: Callable[[Batch], int] | None


def valid_labels(batch: Batch) -> int:
    """The number of labels that are not ignored, without a shift; the number of samples if there are no labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return batch_size(batch) if labels is None else int((labels != IGNORE_INDEX).sum())


SUM = Weighing(None)
NEXT_TOKENS = Weighing(valid_tokens)
WEIGHINGS = (SUM, NEXT_TOKENS, Weighing(valid_labels), Weighing(batch_size))


@aside()
def measure_weighing(step: GuestStep, batch: Batch) -> Weighing:
    """The first weighing for which the losses of two samples combine into the loss of both.

    Dropout is off during the measurement. Model and random states are restored afterwards. Raises `LeverError` if no
    weighing fits, or if the loss of a single sample cannot be computed.
    """
    pair = probe(batch)
    parts = split_batch(pair, 2)
    with everything_restored(step.model), evaluating(step.model), torch.no_grad():
        try:
            whole, *alone = (float(step.loss(step.model, part)) for part in (pair, *parts))
        except Exception as error:  # a loss for whole batches may raise anything for a single sample
            raise LeverError(f"the loss of a part of its batch cannot be computed ({error})") from error
    apart = [abs(whole - _total(weighing, alone, parts)) / abs(whole) for weighing in WEIGHINGS] if whole else []
    # The strict limit first: in 16 bits several weighings may agree within the loose one.
    for rounding in (ROUNDING, ROUNDING_16_BIT if _is_16_bit(step) else ROUNDING):
        for weighing, distance in zip(WEIGHINGS, apart, strict=False):
            if distance <= rounding:
                return weighing
    raise LeverError(
        f"the losses of two samples, {alone[0]:g} and {alone[1]:g}, do not combine into the batch loss, {whole:g}, "
        "neither added nor weighted by tokens, labels or samples"
    )


def probe(batch: Batch) -> Batch:
    """Two short samples of a batch with different numbers of labels and masked tokens.

    Every divisor that a loss may use then differs between them.
    """
    pair = first_samples(as_tensors(batch), 2)
    if not isinstance(pair, Mapping):
        return pair
    if widths := [value.shape[1] for value in pair.values() if is_table(value)]:
        pair = stretched(pair, min(LENGTH, max(widths)))
    labels: Any = pair.get("labels")
    changed: dict[str, torch.Tensor] = {
        key: _padded(value) for key, value in pair.items() if "mask" in str(key) and is_table(value)
    }
    if is_table(labels) and labels.shape[1] > max(LABELLED[1]):
        changed["labels"] = _labelled(labels)
    return {**pair, **changed}


def _labelled(labels: torch.Tensor) -> torch.Tensor:
    """Labels with few entries in the first sample, and more in the second."""
    known = labels[labels != IGNORE_INDEX]
    made = torch.full_like(labels, IGNORE_INDEX)
    for sample, places in enumerate(LABELLED):
        for place in places:
            made[sample, place] = known[(sample + place) % len(known)] if len(known) else 0
    return made


def _padded(mask: torch.Tensor) -> torch.Tensor:
    """A mask that hides the last quarter of the first sample."""
    made = torch.ones_like(mask)
    made[0, mask.shape[1] * 3 // 4 :] = 0
    return made


def _total(weighing: Weighing, alone: list[float], parts: list[Batch]) -> float:
    counts = [1 if weighing.count is None else weighing.count(part) for part in parts]
    whole = 1 if weighing.count is None else sum(counts)
    return sum(count * loss for count, loss in zip(counts, alone, strict=True)) / whole


def _is_16_bit(step: GuestStep) -> bool:
    dtypes = {parameter.dtype for parameter in step.model.parameters()}
    return step.precision != "fp32" or not dtypes.isdisjoint(AUTOCAST_DTYPES.values())
