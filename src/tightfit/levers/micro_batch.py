"""Micro-batches: gradient accumulation whose sum is the gradient of the whole batch, token for token.

The loss of a causal language model is a mean over valid tokens. A mean of the micro-batches' means differs from it if
they have different numbers of valid tokens. So each micro-batch is weighted by its share of the valid tokens, which are
counted before the first one runs.
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
        if isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided:
            raise LeverError(
                "the batch holds a nested tensor of the layout strided, which has no shape: make it with "
                "layout=torch.jagged, or pad it with torch.nested.to_padded_tensor"
            )
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    raise LeverError("the batch holds no tensor with a batch dimension, so it cannot be split in micro-batches")


def inseparable_samples(batch: Batch, loss: Loss) -> int:
    """The number of inseparable samples of a batch.

    A sample is a row. If the loss compares rows, as it does the two answers of a preference pair, a sample is a group
    of `loss.rows_together` rows.
    """
    return batch_size(batch) // getattr(loss, "rows_together", 1)


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """Split the batch into `count` parts along the first dimension, the longer parts last.

    Values without a batch dimension go to every part. Raises `LeverError` if there are fewer samples than parts.
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
    """The number of tokens over which the loss of a batch is a mean: labels that are not `IGNORE_INDEX`.

    Labels of a causal language model, int64 (B, L) like its tokens, are counted after the shift by one. Without labels,
    or with floating-point labels (regression), the result is the number of samples.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if labels is None or labels.is_floating_point():
        return batch_size(batch)
    tokens = batch.get("input_ids")
    # The shift of labels (B, 1) would be empty: all micro-batches would count 0 tokens, and all but one be dropped.
    is_shifted = labels.dim() > 1 and labels.shape[-1] > 1 and (tokens is None or tokens.shape == labels.shape)
    return int(((labels[..., 1:] if is_shifted else labels) != IGNORE_INDEX).sum())


def as_parts(batches: Sequence[Batch], loss: Loss) -> list[Part]:
    """The micro-batches of one step, with weights such that their losses add up to the loss of the whole batch.

    Losses with `reduction == "sum"` add up without weights. Otherwise a micro-batch's weight is its share of the counts
    that the loss's attribute `count` returns for each batch, or of the valid tokens if it has no such attribute. A
    micro-batch with a count of zero is left out, because its mean would divide by zero.
    """
    if len(batches) == 1 or getattr(loss, "reduction", "mean") == "sum":
        return [Part(batch, 1.0) for batch in batches]
    counts = [getattr(loss, "count", valid_tokens)(batch) for batch in batches]
    total = sum(counts)
    if total == 0:
        return [Part(batches[0], 1.0)]  # no label counts: one part gives the loss that the whole batch would give
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
