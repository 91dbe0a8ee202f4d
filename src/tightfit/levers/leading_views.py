"""Applies views of logits (..., V) to their hidden states (..., D), for views that do not touch the vocabulary.

Each function takes the hidden states, V, and the operation's own arguments. It returns the new hidden states, or None
if the operation touches the vocabulary or is not supported.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LeadingView = Callable[..., Tensor | None]


def indexed(hidden: Tensor, vocabulary: int, index: Any) -> Tensor | None:
    """logits[index]."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is None or isinstance(entry, int | slice | Tensor) or entry is Ellipsis for entry in entries):
        return None
    dots = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    before, after = entries[:dots], entries[dots + 1 :]
    leaves_last = is_full(after[-1]) if after else dimensions_taken(without_full_end(before)) < hidden.dim()
    return hidden[index] if leaves_last else None


def is_full(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def without_full_end(entries: Sequence[Any]) -> Sequence[Any]:
    """The entries without full slices at the end, which select everything, as no entry does."""
    while entries and is_full(entries[-1]):
        entries = entries[:-1]
    return entries


def dimensions_taken(entries: Sequence[Any]) -> int:
    """The number of dimensions from which these entries of an index select."""
    masks = [e.dim() for e in entries if isinstance(e, Tensor) and e.dtype in (torch.bool, torch.uint8)]
    places = [e for e in entries if e is not None and not isinstance(e, bool)]
    return sum(masks) + len(places) - len(masks)


def viewed(hidden: Tensor, vocabulary: int, *shape: Any) -> Tensor | None:
    """logits.view(shape) and logits.reshape(shape): the vocabulary must stay the last dimension."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    tokens = hidden.shape[:-1].numel()
    leading = sizes[:-1]
    if sizes[-1] == -1 and torch.Size(leading).numel() != tokens:
        return None
    if sizes[-1] not in (-1, vocabulary):
        return None
    if not leading:  # a view with one dimension: the vocabulary is the last one only if there is one token
        return hidden.reshape(hidden.shape[-1]) if tokens == 1 else None
    return hidden.reshape(*leading, hidden.shape[-1])


def flattened(hidden: Tensor, vocabulary: int, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    start, end = leading_dimension(hidden, start_dim), leading_dimension(hidden, end_dim)
    return None if start is None or end is None else hidden.flatten(start, end)


def unsqueezed(hidden: Tensor, vocabulary: int, dim: int) -> Tensor | None:
    place = dim if dim >= 0 else dim + hidden.dim() + 1
    return hidden.unsqueeze(place) if 0 <= place < hidden.dim() else None


def squeezed(hidden: Tensor, vocabulary: int, dim: int) -> Tensor | None:
    place = leading_dimension(hidden, dim)
    return None if place is None else hidden.squeeze(place)


def transposed(hidden: Tensor, vocabulary: int, dim0: int, dim1: int) -> Tensor | None:
    first, second = leading_dimension(hidden, dim0), leading_dimension(hidden, dim1)
    return None if first is None or second is None else hidden.transpose(first, second)


def contiguous(hidden: Tensor, vocabulary: int) -> Tensor:
    return hidden


def leading_dimension(hidden: Tensor, dim: int) -> int | None:
    """The dimension counted from the front; None if it is the last one or out of range."""
    place = dim if dim >= 0 else dim + hidden.dim()
    return place if 0 <= place < hidden.dim() - 1 else None


LEADING_VIEWS: dict[Any, LeadingView] = {
    Tensor.__getitem__: indexed,
    Tensor.view: viewed,
    Tensor.reshape: viewed,
    torch.reshape: viewed,
    Tensor.flatten: flattened,
    torch.flatten: flattened,
    Tensor.unsqueeze: unsqueezed,
    torch.unsqueeze: unsqueezed,
    Tensor.squeeze: squeezed,
    torch.squeeze: squeezed,
    Tensor.transpose: transposed,
    torch.transpose: transposed,
    Tensor.contiguous: contiguous,
}
