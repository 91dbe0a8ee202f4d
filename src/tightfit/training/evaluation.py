"""The loss on samples that are not trained on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tightfit.levers.chunked_loss import chunks_without_gradients
from tightfit.memory.failure import parse_out_of_memory
from tightfit.models.mode import evaluating
from tightfit.ranks.processes.ranks import ALONE, Ranks
from tightfit.step import Precision, autocast
from tightfit.training.data.samples import Samples
from tightfit.training.objective import Objective, counted


class HeldOutSums(NamedTuple):
    """The sum of the losses of samples, and the number of valid tokens (or pairs) over which they are a mean."""

    loss: float
    count: float

    @property
    def mean(self) -> float | None:
        return self.loss / self.count if self.count else None


@torch.no_grad()
def held_out_sums(
    model: nn.Module,
    samples: Samples,
    loss: Objective,
    *,
    micro_batch_size: int,
    precision: Precision = "fp32",
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda line: None,
    ranks: Ranks = ALONE,
) -> HeldOutSums | None:
    """The losses of this rank's part of the samples, in evaluation mode; None where `stop`, asked before each
    micro-batch, says so.

    With the training's micro-batch size, and its levers in force, an evaluation needs no more memory than a training
    step: it runs the same forward and keeps nothing for backward. Where it runs out of memory all the same, its own
    micro-batches are halved, and `note` is told; those of the training stay as they are. One sample that does not fit
    raises what the allocator raised.

    Samples of unlike length run by length, so that few are padded much, the longest first, so that an evaluation that
    runs out of memory does so at once.
    """
    device = next(model.parameters()).device
    order = np.arange(len(samples)) if samples.is_even else np.argsort(-samples.lengths, kind="stable")
    order = order[ranks.rank :: ranks.size]  # each rank has long and short ones
    total, tokens, first, size = 0.0, 0, 0, max(micro_batch_size // samples.rows, 1)
    with evaluating(model), chunks_without_gradients(model):
        while first < len(order):
            if stop():
                return None
            batch = counted(samples.batch(order[first : first + size]), device)
            share = _share(model, batch, loss, precision, device, may_fail=size > 1)
            if share is None:  # outside of the `except`, whose exception holds what the frames held
                size //= 2
                note(f"the evaluation is out of memory: it goes on with {size} samples at a time; the training's stay")
                continue
            total += share
            tokens += loss.count(batch)
            first += size
    return HeldOutSums(total, tokens)


def _share(
    model: nn.Module,
    batch: dict[str, Any],
    loss: Objective,
    precision: Precision,
    device: torch.device,
    *,
    may_fail: bool,
) -> float | None:
    """The summed loss of one micro-batch; None where it ran out of memory and may."""
    try:
        with autocast(precision, device.type):
            return float(loss(model, batch)) * loss.count(batch)
    except RuntimeError as error:
        if not may_fail or parse_out_of_memory(str(error)) is None:
            raise
        return None
