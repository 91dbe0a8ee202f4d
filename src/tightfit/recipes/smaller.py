"""Batches of another size: shorter sequences, fewer rows."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tightfit.levers.micro_batch import batch_size
from tightfit.step import Batch, TokenBatch


def length_of(batch: Batch) -> int | None:
    """The tokens of a row: the largest second dimension of the batch's tables of integers; None if it has none."""
    if isinstance(batch, TokenBatch):
        return batch.length
    values = batch.values() if isinstance(batch, dict) else batch
    widths = [v.shape[1] for v in values if isinstance(v, Tensor) and v.dim() == 2 and not v.is_floating_point()]
    return max(widths, default=None)


def shortened(batch: Batch, length: int) -> Batch:
    """The batch with at most `length` tokens in a row. Tables of another width stay."""
    if isinstance(batch, TokenBatch):
        return batch._replace(length=length)
    width = length_of(batch)

    def cut(value: Any) -> Any:
        is_row = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == width
        return value[:, :length] if is_row else value

    return _mapped(batch, cut)


def with_rows(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch. Values without a row for each sample stay."""
    if isinstance(batch, TokenBatch):
        return batch._replace(size=rows)
    size = batch_size(batch)

    def cut(value: Any) -> Any:
        is_row = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size
        return value[:rows] if is_row else value

    return _mapped(batch, cut)


def _mapped(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    if isinstance(batch, dict):
        return {name: change(value) for name, value in batch.items()}
    return tuple(change(value) for value in batch)
