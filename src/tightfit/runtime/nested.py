"""Walks over nested structures of user values. For arguments of operators, `runtime/operators.py` is faster."""

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

# Most attributes of modules are of these types, which hold nothing. The type is compared, not its bases: a subclass may
# hold something.
INERT = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, types.FunctionType})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists, tuples and other containers that PyTorch's tree functions support."""
    if type(value) in INERT or (isinstance(value, dict | list | tuple) and not value):
        return iter(())
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Flattened:
    """The leaves of a value, and the function that rebuilds the value from other leaves."""

    leaves: tuple[Any, ...]
    restored: Callable[[Sequence[Any]], Any]


def flatten(value: Any) -> Flattened:
    """Flatten nested dicts, lists, tuples, dataclasses and mappings of any class.

    A mapping of another class is rebuilt by calling the class with a dict.
    """
    values, spec = tree_flatten(value)
    opened = [_opened(each) for each in values]

    def restored(flat: Sequence[Any]) -> Any:
        rest = iter(flat)
        return tree_unflatten([each.restored(tuple(islice(rest, len(each.leaves)))) for each in opened], spec)

    return Flattened(tuple(leaf for each in opened for leaf in each.leaves), restored)


def _opened(value: Any) -> Flattened:
    """Flatten a leaf of PyTorch's tree functions, which may be a dataclass or a mapping with several leaves."""
    if isinstance(value, Mapping):
        inner = flatten(dict(value))
        make: Any = type(value)
        return Flattened(inner.leaves, lambda flat: make(inner.restored(flat)))
    if is_dataclass(value) and not isinstance(value, type):
        inner = flatten({field.name: getattr(value, field.name) for field in fields(value)})
        return Flattened(inner.leaves, lambda flat: _with_fields(value, inner.restored(flat)))
    return Flattened((value,), lambda flat: flat[0])


def _with_fields(value: Any, changed: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values in its fields."""
    # Not `dataclasses.replace`: that calls `__init__`, which may take other arguments than the fields.
    made = copy.copy(value)
    for name, content in changed.items():
        object.__setattr__(made, name, content)
    return made
