"""The loss on samples that are not trained on."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tightfit.data.samples import Samples
from tightfit.models.mode import evaluating
from tightfit.step import Loss, Precision, autocast
from tightfit.training.objective import VALID_TOKENS, counted


@torch.no_grad()
def evaluation_loss(
    model: nn.Module,
    samples: Samples,
    loss: Loss,
    *,
    micro_batch_size: int,
    precision: Precision = "fp32",
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean loss over the valid tokens of all samples, in evaluation mode; None where there is not one valid token, or
    where `stop`, asked before each micro-batch, says so.

    With the training's micro-batch size, and its levers in force, an evaluation needs no more memory than a training
    step: it runs the same forward and keeps nothing for backward.
    """
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    with evaluating(model):
        for batch in _batches(samples, micro_batch_size, device):
            if stop():
                return None
            with autocast(precision, device.type):
                total += float(loss(model, batch)) * batch[VALID_TOKENS]
            tokens += batch[VALID_TOKENS]
    return total / tokens if tokens else None


def _batches(samples: Samples, size: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """All samples in batches of at most `size` rows; those of unlike length by length, so that few are padded much, the
    longest first, so that an evaluation that runs out of memory does so at once.
    """
    order = np.arange(len(samples)) if samples.is_even else np.argsort(-samples.lengths, kind="stable")
    size = max(size // samples.rows, 1)
    for first in range(0, len(samples), size):
        yield counted(samples.batch(order[first : first + size]), device)
