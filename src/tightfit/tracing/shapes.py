"""Infers an operator's results: shapes, strides and dtypes from its meta kernel, cached by signature."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._prims_common import compute_elementwise_output_strides
from torch.utils._pytree import tree_map_only

from tightfit.runtime.internals import meta_kernels_of
from tightfit.runtime.simulation import simulation
from tightfit.tracing.rules import SHAPE_RULES
from tightfit.tracing.unbacked import unbacked_tensor

# A dry run computes operators on known inputs for real up to these sizes: elements of floating-point tensors, ...
KNOWN_LIMIT = 1 << 16
# ... bytes of booleans, such as a mask of 11,000 x 11,000 tokens, ...
LARGEST_KNOWN = 1 << 27
# ... and bytes of integers, such as a router's one-hot choice of 8 of 128 experts for 32,768 tokens. An unknown choice
# is assumed to send every token to every expert.
LARGEST_INTEGERS = 1 << 28


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
    def is_vast(self) -> bool:
        """True if a result of this shape is too large to compute, even from known integers."""
        is_number = not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype == torch.bool)
        return self.bytes > (LARGEST_INTEGERS if is_number else LARGEST_KNOWN)

    @property
    def is_contiguous(self) -> bool:
        """True if `Tensor.contiguous` returns the tensor itself. Otherwise it copies."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def unbacked(self) -> torch.Tensor:
        """An unbacked CPU tensor of this shape."""
        return unbacked_tensor(self.shape, self.stride, self.dtype)


def contiguous(sizes: Sequence[int], dtype: torch.dtype) -> TensorShape:
    """A contiguous tensor of these sizes."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * max(1, size))
    return TensorShape(tuple(sizes), tuple(reversed(strides[: len(sizes)])), dtype)


def lies_by_length(heads: TensorShape) -> bool:
    """True if a tensor (batch, heads, length, width) is contiguous as (batch, length, heads, width)."""
    sizes, strides = (tuple(each[dim] for dim in (0, 2, 1, 3)) for each in (heads.shape, heads.stride))
    return TensorShape(sizes, strides, heads.dtype).is_contiguous


def inputs_and_key(operator: Any, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], Any]:
    """The tensors among a call's arguments, and a hashable key for it.

    Calls with the same key have results of the same shapes, strides and dtypes. `traits_of` must know the operator.
    """
    inputs: list[torch.Tensor] = []
    # With the default dtype: it is the result's dtype if a call has no floating-point tensor and no dtype. The operator
    # by its identity, which `traits_of` keeps from being another one's: PyTorch hashes operators in Python. Some rules
    # differ between the CPU and CUDA.
    key = (id(operator), torch.get_default_dtype(), simulation.of_cuda, *_marks(args, inputs))
    if kwargs:
        key = (*key, _NAMED, *kwargs, *_marks(kwargs.values(), inputs))
    # A number for each key, so that its long tuple is hashed once and not at each look-up.
    number = _numbers.get(key)
    return inputs, number if number is not None else _numbers.setdefault(key, next(_counter))


_NAMED = object()
_numbers: dict[Any, int] = {}
_counter = itertools.count()


def _marks(arguments: Iterable[Any], inputs: list[torch.Tensor]) -> list[Any]:
    """Tensors by shape, stride and dtype, everything else by type and value. Adds the tensors to `inputs`."""
    marks: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            inputs.append(argument)
            marks.append((argument.shape, argument.stride(), argument.dtype))
        elif isinstance(argument, list | tuple):
            marks.append(tuple(_marks(argument, inputs)))
        elif isinstance(argument, bool | int | float):
            marks.append((type(argument), argument))
        elif isinstance(argument, torch.ScriptObject):
            marks.append(
                object()
            )  # its content is unknown, and it refuses to be compared: no other call is like this one
        else:
            marks.append(argument)
    return marks


_remembered: dict[Any, Any] = {}


def result_shapes(operator: Any, args: tuple, kwargs: dict, key: Any, is_number: Callable[[torch.Tensor], bool]) -> Any:
    """The operator's results with a `TensorShape` in place of each tensor. Nothing is computed.

    `is_number` says which tensors are known single numbers. The meta kernel gets these tensors themselves, because the
    result's dtype depends on whether Python wrapped them.
    """
    shapes = _remembered.get(key)
    if shapes is None:
        try:
            results = on_meta(operator, args, kwargs, is_number)
        except RuntimeError:
            # Some meta kernels require all tensors on one device, zero-dimensional CPU tensors too.
            results = on_meta(operator, args, kwargs, lambda tensor: False)
        shapes = tree_map_only(torch.Tensor, TensorShape.of, results)
        is_pointwise = torch.Tag.pointwise in getattr(operator, "tags", ()) and operator not in SHAPE_RULES
        if is_pointwise and isinstance(shapes, TensorShape):
            shapes = _as_iterated(operator, shapes, args)
        _remembered[key] = shapes
    return shapes


aten = torch.ops.aten
_READS_LAST_FIRST = frozenset({aten.threshold_backward.default})
_COPIES_ITS_FIRST = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})  # and fills the copy in place
_OF_CUDA = frozenset({aten.native_dropout_backward.default})  # lays its result out by its sizes


def _as_iterated(operator: Any, result: TensorShape, args: tuple) -> TensorShape:
    """The result of a pointwise operator, which lies as its operands do (`TensorIterator` in ATen).

    PyTorch's meta kernels of many are references in Python. These make 16-bit operands fp32 first, so that an expanded
    one, which should leave the order to the others, gets an order of its own. Some take the operands in another order
    than the kernels.
    """
    operands = [each for each in args if isinstance(each, torch.Tensor)]
    if len(operands) < 2 or operator in _COPIES_ITS_FIRST or (simulation.of_cuda and operator in _OF_CUDA):
        return result
    if operator in _READS_LAST_FIRST:
        operands.reverse()
    alike = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in operands]
    if not simulation.of_cuda:  # a CPU converts operands first, a card as it reads them
        unconverted = operator is aten.where.self  # what chooses
        common = functools.reduce(torch.promote_types, [x.dtype for x in alike[unconverted:]])
        common = common if not result.dtype.is_floating_point or common.is_complex else result.dtype
        alike[unconverted:] = [
            x if x.dtype == common else torch.empty_like(x, dtype=common) for x in alike[unconverted:]
        ]
    alike = [x.expand(result.shape) for x in alike]
    return result._replace(stride=tuple(compute_elementwise_output_strides(*alike)))


def on_meta(operator: Any, args: tuple, kwargs: dict, is_number: Callable[[torch.Tensor], bool]) -> Any:
    """Run the operator's meta kernel, or our own rule if it has one in `SHAPE_RULES`."""

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if is_number(tensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(torch.Tensor, meta, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta")}
    if kwargs.get("generator") is not None:  # nothing is drawn, and some meta kernels take none (`exponential_`)
        kwargs = {**kwargs, "generator": None}
    rule = SHAPE_RULES.get(operator) or operator
    with meta_kernels_of("cuda" if simulation.of_cuda else "cpu"):
        return rule(*args, **kwargs)
