"""A batch of whatever structure as the tuple that the planner takes, and the way back."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightfit.errors import InputError
from tightfit.step import Batch


@dataclass(frozen=True)
class Flattened:
    """What a batch holds, and the way back."""

    leaves: tuple[Any, ...]
    restored: Callable[[Batch], Any]


def flattened(batch: Any) -> Flattened:
    """Dicts, lists, tuples and dataclasses, however nested; mappings of other classes are made anew from a dict.

    Raises `InputError` where no tensor is found.
    """
    flat = _flattened(batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in flat.leaves):
        raise InputError(
            f"MemoryBudget: a batch of class {type(batch).__name__} holds no tensors that can be seen: "
            "return a dict, list, tuple or dataclass"
        )
    return flat


def _flattened(value: Any) -> Flattened:
    values, spec = tree_flatten(value)
    opened = [_opened(each) for each in values]

    def restored(flat: Batch) -> Any:
        rest = iter(flat)
        return tree_unflatten([each.restored(tuple(islice(rest, len(each.leaves)))) for each in opened], spec)

    return Flattened(tuple(leaf for each in opened for leaf in each.leaves), restored)


def _opened(value: Any) -> Flattened:
    """What PyTorch's tree functions take for a leaf: a dataclass or mapping may still hold several."""
    if isinstance(value, Mapping):
        inner = _flattened(dict(value))
        make: Any = type(value)
        return Flattened(inner.leaves, lambda flat: make(inner.restored(flat)))
    if is_dataclass(value) and not isinstance(value, type):
        inner = _flattened({field.name: getattr(value, field.name) for field in fields(value)})
        return Flattened(inner.leaves, lambda flat: _with_fields(value, inner.restored(flat)))
    return Flattened((value,), lambda flat: flat[0])


def _with_fields(value: Any, changed: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values in its fields: frozen or not, whatever its `__init__` takes."""
    made = copy.copy(value)
    for name, content in changed.items():
        object.__setattr__(made, name, content)
    return made
