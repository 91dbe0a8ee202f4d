"""Follows what a dry run knows of numbers that it does not have: they are finite.

`torch.isnan(x).any()` is False then, and `torch.isfinite(x).all()` is True. Both are known although `x` is not.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from tightfit.runtime.internals import no_modes

aten = torch.ops.aten
_TESTS = {
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
    aten.isfinite.default: True,
}
# `isfinite` is x == x and abs(x) != inf; `isnan` is x != x on some paths.
_WITH_INFINITY = {aten.eq.Scalar: False, aten.ne.Scalar: True}
_WITH_ITSELF = {aten.eq.Tensor: True, aten.ne.Tensor: False}
_SAME = frozenset(
    {aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims}
    | {aten.clone.default, aten._to_copy.default}
)
_OPPOSITE = frozenset({aten.logical_not.default, aten.bitwise_not.default})
_COUNTS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default})
_COMPARED = frozenset({aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, *_WITH_INFINITY})
_OF_TWO = frozenset(
    {aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.mul.Tensor}
    | {aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor}
)


_FOLLOWED = _SAME | _OPPOSITE | _COUNTS | _COMPARED | _OF_TWO


def known_everywhere(func: Any, args: tuple, known: Callable[[torch.Tensor], bool | None]) -> bool | None:
    """The value of every element of an operator's result, where all numbers are finite. None if that is not known.

    `known` says the same of an argument. A count of what is nowhere is False.
    """
    if func in _TESTS:
        return _TESTS[func]
    if func in _WITH_ITSELF and args[0] is args[1] and args[0].is_floating_point():
        return _WITH_ITSELF[func]
    if func in _WITH_INFINITY and args[0].is_floating_point() and abs(args[1]) == math.inf:
        return _WITH_INFINITY[func]
    if func not in _FOLLOWED:
        return None
    tensors = args[: 2 if func in _OF_TWO else 1]
    given = [known(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if len(given) < len(tensors) or None in given:
        return None
    if func in _SAME:
        return given[0]
    if func in _OPPOSITE:
        return None if func is aten.bitwise_not.default and args[0].dtype != torch.bool else not given[0]
    if func in _COUNTS:
        return None if given[0] else False
    numbers = args[1:2] if func in _COMPARED else ()
    with no_modes():
        return bool(func(*(torch.tensor(value) for value in given), *numbers))
