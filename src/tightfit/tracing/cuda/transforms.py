"""Blocks of Fourier transforms: copies of operands that lie otherwise, results of earlier passes, cuFFT's work area.

Source: `_exec_fft`, `_fft_c2c_cufft`, `_fft_r2c_cufft`, `_fft_c2r_cufft` in ATen/native/cuda/SpectralOps.cpp. The work
area is cuFFT's own choice. Its manual names one to eight complex numbers for each element that is transformed, and not
when: one is counted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.shapes import TensorShape, contiguous

Shapes = Sequence[TensorShape]
_DIMS_OF_A_PLAN = 3


class _Laid(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def _one_pass(source: _Laid, sizes: Sequence[int], dims: Sequence[int], number: int) -> tuple[list[int], _Laid]:
    """The blocks of one plan of cuFFT's over `dims`, and how its result of `sizes` lies. `number`: bytes, complex."""
    batch = sorted((dim for dim in range(len(sizes)) if dim not in dims), key=lambda dim: -source.stride[dim])
    longer = [dim for dim in batch if source.shape[dim] != 1]
    # The other dimensions become one, which takes a copy unless they lie as one. So does what cuFFT cannot step over.
    is_one = all(source.stride[a] == source.stride[b] * source.shape[b] for a, b in pairwise(longer))
    is_read = is_one and _can_be_embedded([source.stride[dim] for dim in (*longer[-1:], *dims)], len(dims))
    copied = [] if is_read else [source.bytes]
    transformed = math.prod(max(source.shape[dim], sizes[dim]) for dim in dims)
    area = math.prod(source.shape[dim] for dim in batch) * transformed * number
    stride, between = [0] * len(sizes), 1
    for dim in [*batch, *dims][::-1]:
        stride[dim], between = between, between * sizes[dim]
    return [*copied, area, *_freed([area, *copied])], _Laid(tuple(sizes), tuple(stride), number)


def _can_be_embedded(strides: Sequence[int], count: int) -> bool:
    """`as_cufft_embed`: no stride is 0, and of the transformed dimensions each is a multiple of the next."""
    last = strides[-count:]
    return all(strides) and all(outer % inner == 0 for outer, inner in pairwise(last))


def _complex(source: _Laid, dims: Iterable[int], result: int = RESULT) -> tuple[list[int], _Laid]:
    """`_fft_c2c_cufft`. `result`: what stands for its result among the blocks."""
    left, blocks, work = _sorted(source, dims), [], source
    passes = -(-len(left) // _DIMS_OF_A_PLAN)
    buffers = [result if at == (passes - 1) % 2 else source.bytes for at in range(min(passes, 2))]
    for at in range(passes):
        blocks += buffers[at : at + 1]
        made, work = _one_pass(work, source.shape, left[-_DIMS_OF_A_PLAN:], source.itemsize)
        blocks += made
        left = _sorted(work, left[:-_DIMS_OF_A_PLAN])
    return [*blocks, *_freed(size for size in buffers if size != result)], work


def _to_complex(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    dims = arguments[0]
    source, out = _laid(inputs[0]), outputs[0]
    number = 2 * source.itemsize
    if _in_one_plan(dims):
        return [RESULT, *_one_pass(source, out.shape, dims, number)[0]]
    half = [size // 2 + 1 if dim == dims[-1] else size for dim, size in enumerate(source.shape)]
    left = list(dims[:-1])
    passes = 1 + -(-len(left) // _DIMS_OF_A_PLAN)
    buffers = [RESULT if at == (passes - 1) % 2 else out.bytes for at in (0, 1)]
    made, work = _one_pass(source, half, dims[-1:], number)
    blocks = [buffers[0], *made, buffers[1]]
    while left:
        left = _sorted(work, left)
        made, work = _one_pass(work, half, left[-_DIMS_OF_A_PLAN:], number)
        blocks += made
        left = left[:-_DIMS_OF_A_PLAN]
    return [*blocks, -out.bytes]


def _to_real(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    dims = arguments[0]
    source, out = _laid(inputs[0]), outputs[0]
    if _in_one_plan(dims):  # cuFFT overwrites what it makes real, so it gets a copy
        blocks, copy = [source.bytes], source._replace(stride=contiguous(source.shape, inputs[0].dtype).stride)
    else:
        blocks, copy = _complex(source, dims[:-1], source.bytes)
        dims = dims[-1:]
    made, _ = _one_pass(copy, out.shape, dims, source.itemsize)
    return [RESULT, *blocks, *made, -source.bytes]


def _in_one_plan(dims: Sequence[int]) -> bool:
    """`use_optimized_cufft_path`."""
    return len(dims) <= _DIMS_OF_A_PLAN and list(dims[:2]) != [0, 1]


def _sorted(source: _Laid, dims: Iterable[int]) -> list[int]:
    return sorted(dims, key=lambda dim: -source.stride[dim])


def _laid(shape: TensorShape) -> _Laid:
    return _Laid(tuple(shape.shape), tuple(shape.stride), shape.dtype.itemsize)


def _freed(blocks: Iterable[int]) -> list[int]:
    return [-size for size in blocks]


FORMULAS: dict[str, Callable[[Shapes, Shapes, tuple], list[int]]] = {
    "aten._fft_c2c.default": lambda inputs, outputs, arguments: _complex(_laid(inputs[0]), arguments[0])[0],
    "aten._fft_r2c.default": _to_complex,
    "aten._fft_c2r.default": _to_real,
}
