"""What an operator would return: shapes, strides and dtypes from its meta kernel, remembered by signature."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from tightfit.trace.rules import SHAPE_RULES

KNOWN_LIMIT = 1 << 16  # elements: a floating-point tensor up to this size is computed for real if its inputs are known


class TensorShape(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorShape":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether `Tensor.contiguous` gives the tensor itself; else it copies."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def hollow(self, device: str = "cpu") -> torch.Tensor:
        """A tensor of this shape whose memory nobody has touched, marked so."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        set_hollow(tensor)
        return tensor


_HOLLOW = "_tightfit_hollow"


def set_hollow(tensor: torch.Tensor, *, hollow: bool = True) -> None:
    """Mark the memory under a tensor as never written (or as written after all)."""
    tensor.untyped_storage().__dict__[_HOLLOW] = hollow


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether the memory under a tensor was made by a dry run and holds nothing."""
    return tensor.untyped_storage().__dict__.get(_HOLLOW, False)


def signature(argument: Any) -> Any:
    """A hashable key for an argument: tensors by shape, stride and dtype, everything else by type and value."""
    if isinstance(argument, torch.Tensor):
        return TensorShape.of(argument)
    if isinstance(argument, list | tuple):
        return tuple(signature(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((key, signature(value)) for key, value in argument.items())
    return (type(argument), argument) if isinstance(argument, bool | int | float) else argument


_remembered: dict[Any, Any] = {}


def result_shapes(operator: Any, args: tuple, kwargs: dict, key: Any, is_number: Callable[[torch.Tensor], bool]) -> Any:
    """The operator's results with a `TensorShape` in the place of each tensor. Nothing is computed.

    `is_number` tells which tensors are known single numbers: they take part as they are, since whether Python wrapped
    them decides the result's dtype.
    """
    shapes = _remembered.get(key)
    if shapes is None:
        try:
            results = on_meta(operator, args, kwargs, is_number)
        except RuntimeError:
            results = on_meta(operator, args, kwargs, lambda tensor: False)  # some meta kernels insist on one device
        shapes = _remembered[key] = tree_map_only(torch.Tensor, TensorShape.of, results)
    return shapes


def on_meta(operator: Any, args: tuple, kwargs: dict, is_number: Callable[[torch.Tensor], bool]) -> Any:
    """Run the operator's meta kernel, or our own rule where it has none that serves."""

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if is_number(tensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(torch.Tensor, meta, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta")}
    rule = SHAPE_RULES.get(operator) or operator
    return rule(*args, **kwargs)
