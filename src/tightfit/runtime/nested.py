"""Values in whatever structure a user nests them in: those of operators are flatter (`runtime/operators.py`)."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in dicts, lists, tuples and whatever else PyTorch's tree functions open, however nested."""
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Flattened:
    """What a value holds, and the way back."""

    leaves: tuple[Any, ...]
    restored: Callable[[Sequence[Any]], Any]


def flatten(value: Any) -> Flattened:
    """Dicts, lists, tuples, dataclasses and mappings of any class, however nested; mappings of other classes are made
    anew from a dict.
    """
    values, spec = tree_flatten(value)
    opened = [_opened(each) for each in values]

    def restored(flat: Sequence[Any]) -> Any:
        rest = iter(flat)
        return tree_unflatten([each.restored(tuple(islice(rest, len(each.leaves)))) for each in opened], spec)

    return Flattened(tuple(leaf for each in opened for leaf in each.leaves), restored)


def _opened(value: Any) -> Flattened:
    """What PyTorch's tree functions take for a leaf: a dataclass or mapping may still hold several."""
    if isinstance(value, Mapping):
        inner = flatten(dict(value))
        make: Any = type(value)
        return Flattened(inner.leaves, lambda flat: make(inner.restored(flat)))
    if is_dataclass(value) and not isinstance(value, type):
        inner = flatten({field.name: getattr(value, field.name) for field in fields(value)})
        return Flattened(inner.leaves, lambda flat: _with_fields(value, inner.restored(flat)))
    return Flattened((value,), lambda flat: flat[0])


def _with_fields(value: Any, changed: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values in its fields: frozen or not, whatever its `__init__` takes."""
    made = copy.copy(value)
    for name, content in changed.items():
        object.__setattr__(made, name, content)
    return made
