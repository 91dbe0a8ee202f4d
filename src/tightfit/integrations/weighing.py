"""Measures the weights of micro-batches' losses in the loss of their batch, on a few samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tightfit.errors import LeverError
from tightfit.levers.micro_batch import IGNORE_INDEX, batch_size, valid_tokens
from tightfit.planner.separation import trials
from tightfit.runtime.outside import outside_training
from tightfit.step import Batch, Loss, Part


@dataclass(frozen=True)
class Weighing:
    """The weight of a micro-batch is its share of `count` over the batch. With None, losses add up without weights."""

    count: Callable[[Batch], int] | None

    def weighed(self, parts: Sequence[Batch]) -> list[Part]:
        """Parts of a batch with their weights in it."""
        counts = [1 if self.count is None else self.count(part) for part in parts]
        whole = 1 if self.count is None else sum(counts)
        return [Part(part, count / whole if whole else 0.0) for part, count in zip(parts, counts, strict=True)]


def valid_labels(batch: Batch) -> int:
    """The number of labels that are not ignored, without a shift; the number of samples if there are no labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return batch_size(batch) if labels is None else int((labels != IGNORE_INDEX).sum())


SUM = Weighing(None)
NEXT_TOKENS = Weighing(valid_tokens)
WEIGHINGS = (SUM, NEXT_TOKENS, Weighing(valid_labels), Weighing(batch_size))


@outside_training()
def measure_weighing(model: nn.Module, batch: Batch, loss: Loss) -> Weighing:
    """The first weighing for which the losses and gradients of samples combine into those of their batch.

    Dropout is off during the measurement. Model and random states are restored afterwards. Raises `LeverError` if no
    weighing fits, or if the loss of a single sample cannot be computed.
    """
    fitting = list(WEIGHINGS)
    for trial in trials(model, batch, loss):
        fitting = [weighing for weighing in fitting if trial.adds_up(weighing.weighed)]
    if fitting:
        return fitting[0]
    raise LeverError(
        "the losses of samples do not combine into the batch loss, neither added nor weighted by tokens, labels or "
        "samples"
    )
