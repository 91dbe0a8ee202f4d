"""Batches of other sizes: how many tokens, which values a size may take, and the batch of a size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.levers.micro_batch import batch_size
from tightfit.models.loading import position_limit
from tightfit.step import Batch, TokenBatch

MULTIPLE = 64  # of a sequence's tokens, which matrix units like
MOST = 2**20  # tokens of a batch, beyond which nothing is tried: a dry run computes with the ids of all tokens
Shape = tuple[int, int]  # sequences, and tokens of each


def token_count(batch: Batch) -> int | None:
    """The tokens of a batch; None where it is none of token ids."""
    if isinstance(batch, TokenBatch):
        return batch.size * batch.length
    if isinstance(batch, dict) and "input_ids" in batch:
        return batch["input_ids"].numel()
    return None


def resized(batch: Batch, size: int, length: int) -> Batch | None:
    """A batch of as many sequences of as many tokens; None where the batch has other tensors than those of tokens."""
    if isinstance(batch, TokenBatch):
        return batch._replace(size=size, length=length)
    if not isinstance(batch, dict) or "input_ids" not in batch:
        return None
    shape = batch["input_ids"].shape
    if len(shape) != 2 or any(not isinstance(t, torch.Tensor) or t.shape != shape for t in batch.values()):
        return None
    times = (-(-size // shape[0]), -(-length // shape[1]))
    return {name: tensor.repeat(*times)[:size, :length].contiguous() for name, tensor in batch.items()}


def shape_of(batch: Batch) -> Shape | None:
    """Sequences and tokens of a batch; None where it is none of token ids."""
    if resized(batch, 1, 1) is None:
        return None
    return (batch.size, batch.length) if isinstance(batch, TokenBatch) else tuple(batch["input_ids"].shape)


@dataclass(frozen=True)
class Dimension:
    """A size that may grow: its value now, which values there are, and the batch of a value."""

    name: str
    now: int
    multiple_of: int
    most: int
    shape: Callable[[int], Shape]


def dimensions_of(model: nn.Module, batch: Batch, count: int) -> tuple[Dimension, Dimension] | None:
    """The length of the sequences of a batch, and their number, a multiple of `count`; None where it is none of token
    ids.
    """
    shape = shape_of(batch)
    if shape is None:
        return None
    size, length = shape
    multiple = MULTIPLE if length % MULTIPLE == 0 else 1
    most = min(position_limit(model) or MOST, max(length, MOST // size))
    return (
        Dimension("length", length, multiple, most, lambda n: (size, n)),
        Dimension("size", size, count, max(size, MOST // length), lambda n: (n, length)),
    )


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
