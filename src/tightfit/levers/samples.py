"""Changes of a batch: its first samples, some of them, other lengths, labels and masks of unlike number."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import InputError
from tightfit.levers.micro_batch import IGNORE_INDEX, batch_size
from tightfit.step import Batch

LABELLED = ((0, 1), (1, 2, 3))  # positions of labels: 1 and 3 of them after a shift by one, 2 and 3 without


def first_samples(batch: Batch, count: int) -> Batch:
    """The first samples of a batch. Values without a batch dimension do not change."""
    return per_sample(batch, lambda value: value[:count])


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Copies of these samples of a batch, and of its values without a batch dimension."""

    def picked(value: torch.Tensor) -> torch.Tensor:
        return value[torch.tensor(rows, device=value.device)]

    return mapped(per_sample(batch, picked), lambda v: v.clone() if isinstance(v, torch.Tensor) else v)


def stretched(batch: Batch, length: int) -> Batch:
    """The batch with sequences of another length: its tokens are repeated or cut.

    Sequences are the tensors (B, L) whose L is the largest second dimension of integer tensors.
    """
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    widths = [v.shape[1] for v in values if is_table(v)]
    if not widths:
        raise InputError("max_length: the batch holds no tensor of token ids (batch, length) whose length could be set")
    width = max(widths)

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.shape[1] != width:
            return value
        return value.repeat(1, -(-length // width))[:, :length]

    return mapped(batch, changed)


def shortened(batch: Batch, length: int) -> Batch:
    """The batch with sequences of at most `length` tokens; the batch itself, if it holds no tokens."""
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    widths = [value.shape[1] for value in values if is_table(value)]
    return stretched(batch, min(length, max(widths))) if widths else batch


def unlike(batch: Batch) -> Batch:
    """The batch with unlike numbers of labels and of masked tokens in every two samples that follow each other.

    Every divisor that a loss may use then differs between them.
    """
    if not isinstance(batch, Mapping):
        return batch
    labels: Any = batch.get("labels")
    changed: dict[str, torch.Tensor] = {
        key: _padded(value) for key, value in batch.items() if "mask" in str(key) and is_table(value)
    }
    if is_table(labels) and labels.shape[1] > max(LABELLED[1]):
        changed["labels"] = _labelled(labels)
    return {**batch, **changed} if changed else batch


def is_table(value: Any) -> bool:
    """True if a value of a batch has an integer or a boolean for each token: (B, L)."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def per_sample(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with `change` applied to the tensors that have a row for each sample."""
    size = batch_size(batch)

    def changed(value: Any) -> Any:
        per_sample = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size
        return change(value) if per_sample else value

    return mapped(batch, changed)


def mapped(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """The batch with `change` applied to each of its values."""
    if isinstance(batch, Mapping):
        return {key: change(value) for key, value in batch.items()}
    return tuple(change(value) for value in batch)


def on_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with its tensors on a device."""
    return mapped(batch, lambda value: value.to(device) if isinstance(value, torch.Tensor) else value)


def _labelled(labels: torch.Tensor) -> torch.Tensor:
    """Labels with few entries in each other sample, and more in the rest."""
    known = labels[labels != IGNORE_INDEX]
    made = torch.full_like(labels, IGNORE_INDEX)
    for sample in range(len(labels)):
        for place in LABELLED[sample % 2]:
            made[sample, place] = known[(sample + place) % len(known)] if len(known) else 0
    return made


def _padded(mask: torch.Tensor) -> torch.Tensor:
    """A mask that hides the last quarter of each other sample."""
    made = torch.ones_like(mask)
    made[::2, mask.shape[1] * 3 // 4 :] = 0
    return made
