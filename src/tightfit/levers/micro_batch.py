"""Micro-batches: a batch in several passes whose gradients add up to the gradient of the whole, token for token.

The loss of a causal language model is a mean over valid tokens. The mean of micro-batches' means is another number
as soon as their lengths differ; so each one is weighted by its share of the valid tokens, counted before the first
one runs.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tightfit.errors import LeverError
from tightfit.step import Batch, Loss, Part, TokenBatch

IGNORE_INDEX = -100


def as_tensors(batch: Batch) -> Batch:
    """The batch as it is passed to the model."""
    return batch.tensors() if isinstance(batch, TokenBatch) else batch


def batch_size(batch: Batch) -> int:
    """Length of the first dimension of the batch's first tensor with one. Raises `LeverError` if there is none."""
    for value in _values(as_tensors(batch)):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    raise LeverError("the batch holds no tensor with a batch dimension, so it cannot be split in micro-batches")


def inseparable_samples(batch: Batch, loss: Loss) -> int:
    """How many samples a batch has that cannot be split: its rows, or, where the loss compares rows (a preference
    pair's two answers), groups of `loss.rows_together` of them.
    """
    return batch_size(batch) // getattr(loss, "rows_together", 1)


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """The batch in `count` parts along the first dimension, the longer ones last. What is not per sample goes to
    each.

    Raises `LeverError` if there are fewer samples than parts.
    """
    batch = as_tensors(batch)
    size = batch_size(batch)
    if not 1 <= count <= size:
        raise LeverError(f"a batch of {size} samples cannot be split in {count} micro-batches")
    if count == 1:
        return [batch]
    bounds = [i * size // count for i in range(count + 1)]
    return [_slice(batch, first, last, size) for first, last in itertools.pairwise(bounds)]


def valid_tokens(batch: Batch) -> int:
    """How many tokens of a batch the loss is a mean over: labels that are not ignored. Those of a causal language
    model, int64 (B, L) like its tokens, are counted after the shift by one.

    Without labels, or where they are no classes but numbers, the number of samples.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if labels is None or labels.is_floating_point():
        return batch_size(batch)
    tokens = batch.get("input_ids")
    is_shifted = labels.dim() > 1 and labels.shape[-1] > 1 and (tokens is None or tokens.shape == labels.shape)
    return int(((labels[..., 1:] if is_shifted else labels) != IGNORE_INDEX).sum())


def as_parts(batches: Sequence[Batch], loss: Loss) -> list[Part]:
    """The micro-batches of one step with the weights that make their losses add up to the loss of the whole batch.

    A loss whose `reduction` attribute is `"sum"` adds up as it is; otherwise each counts by its share of what the
    loss's `count` finds in a batch, of valid tokens where it has none. A micro-batch of which nothing counts adds
    nothing, and is left out rather than divided by zero.
    """
    if len(batches) == 1 or getattr(loss, "reduction", "mean") == "sum":
        return [Part(batch, 1.0) for batch in batches]
    counts = [getattr(loss, "count", valid_tokens)(batch) for batch in batches]
    total = sum(counts)
    if total == 0:
        return [Part(batches[0], 1.0)]
    return [Part(batch, count / total) for batch, count in zip(batches, counts, strict=True) if count]


def _values(batch: Batch) -> Sequence[Any]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def _slice(batch: Batch, first: int, last: int, size: int) -> Batch:
    def part(value: Any) -> Any:
        per_sample = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size
        return value[first:last] if per_sample else value

    if isinstance(batch, dict):
        return {key: part(value) for key, value in batch.items()}
    return tuple(part(value) for value in batch)
