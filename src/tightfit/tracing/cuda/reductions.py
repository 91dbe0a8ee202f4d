"""Scratch memory of CUDA's reductions: blocks that share a sum over many numbers combine it in global memory.

Source: ATen/native/cuda/Reduce.cuh, as torch 2.15 ships it among its headers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tightfit.tracing.shapes import TensorShape

WARP = 32
MAX_THREADS = 512  # `mnt_wrapper`
MIN_VALUES, MAX_VALUES = 16, 256  # `min_values_per_thread`, `max_values_per_thread`
LARGEST_INDEX = 2**31  # bytes that a kernel with 32-bit indices can address

# `maxThreadsPerMultiProcessor`: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}

_SUMS = "sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int linalg_vector_norm.default"
_EXTREMES = "amax.default amin.default max.default min.default"
_QUESTIONS = "any.default any.dim any.dims all.default all.dim all.dims"
_VARIANCES = "var.correction std.correction var_mean.correction std_mean.correction"
_PLACES = "max.dim min.dim argmax.default argmin.default"


def _named(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


SUMS, EXTREMES, QUESTIONS, VARIANCES, PLACES = map(_named, (_SUMS, _EXTREMES, _QUESTIONS, _VARIANCES, _PLACES))
_OF_ONE_DIMENSION = _named("prod.dim_int any.dim all.dim " + _PLACES)
REDUCTIONS = SUMS | EXTREMES | QUESTIONS | VARIANCES | PLACES


@dataclass(frozen=True)
class LaunchLimits:
    """The properties of a CUDA device that decide how kernels split their work."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def threads(self) -> int:
        """The number of threads that a multiprocessor holds at the same time."""
        return _THREADS.get(self.capability, 2048)


def reduction_scratch(
    name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple, card: LaunchLimits
) -> list[int]:
    """Bytes of scratch memory of one reduction of a tensor over the dimensions among its arguments (all, if none)."""
    source = inputs[0]
    if name not in REDUCTIONS or not source.numel:
        return []
    rank = len(source.shape)
    named = next((a for a in arguments if isinstance(a, list | tuple)), None)
    if name in _OF_ONE_DIMENSION and arguments and type(arguments[0]) is int:
        named = [arguments[0]]
    dims = {dim % rank for dim in named} if named else set(range(rank))
    converted = _converted(source, outputs) if name in SUMS else []
    if converted:
        source = TensorShape(source.shape, source.stride, outputs[0].dtype)
    return [*converted, *_blocks(source, dims, card, _accumulated(name, source.dtype.itemsize))]


def _accumulated(name: str, width: int) -> int:
    """Bytes of an intermediate result for numbers of `width` bytes, `arg_t` of the functors in native/cuda."""
    if name in EXTREMES:
        return width
    if name in QUESTIONS:
        return 1
    if name in VARIANCES:
        return 4 * max(4, width)  # `WelfordData`: mean, second moment and two counts
    return 16 if name in PLACES else max(4, width)  # a number and its place


def _converted(source: TensorShape, outputs: Sequence[TensorShape]) -> list[int]:
    # `make_reduction` in native/ReduceOpsUtils.h: the input is converted to the dtype of the result, except for 16-bit
    # inputs with an fp32 result, which the kernel converts. Counts of a mask convert it to 64 bits.
    result = outputs[0].dtype if outputs else source.dtype
    is_widened = source.dtype.itemsize == 2 and source.dtype.is_floating_point and result == torch.float32
    return [] if result == source.dtype or is_widened else [source.numel * result.itemsize]


def _blocks(source: TensorShape, dims: set[int], card: LaunchLimits, accumulated: int) -> list[int]:
    """`setReduceConfig`, `global_memory_size` and `semaphore_size`."""
    sizes, strides, width = source.shape, source.stride, source.dtype.itemsize
    reduced = _merged([(strides[d], sizes[d]) for d in sorted(dims, reverse=True)])
    kept = _merged([(strides[d], sizes[d]) for d in range(len(sizes) - 1, -1, -1) if d not in dims])
    outputs = _count(kept)
    reduced = _within_reach(reduced, kept, width)
    inputs = _count(reduced)
    along_rows = not kept or (bool(reduced) and reduced[0][0] < kept[0][0])
    fastest = (reduced if along_rows else kept)[0][0] if reduced or kept else 1
    outer, inner = (inputs, outputs) if along_rows else (outputs, inputs)
    vector = 1
    if fastest == 1 and along_rows and outer >= 128 and len(reduced) == 1:
        outer //= 8 if width == 2 else 4  # `input_vec_size`
    elif fastest == 1 and not along_rows:
        vector = _output_vector(kept, reduced)
        outer //= vector
    block_width, block_height = _block(outer, inner, MAX_THREADS // vector)
    across, down = (block_width, 1) if along_rows else (1, block_width)
    per_thread = _up(inputs, across)
    is_split = per_thread >= min(block_height * 16, MAX_VALUES)
    if is_split:
        across *= block_height
    else:
        down *= block_height
    per_thread = _up(inputs, across)
    grid = _up(outputs // vector, down)
    target = card.multiprocessors * (card.threads // (block_width * block_height))
    if not is_split or per_thread < MAX_VALUES or grid > target:
        return []
    parts = min(max(_up(target, grid), _up(per_thread, MAX_VALUES)), _up(per_thread, MIN_VALUES))
    if parts <= 1:
        return []
    return [accumulated * outputs * parts * (1 if along_rows else block_width * vector), 4 * grid]


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, size) of dimensions, fastest first. Neighbours in memory are merged (`coalesce_dimensions`)."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted((d for d in dims if d[1] > 1), key=lambda d: d[0]):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0], found[-1][1] * size)
        else:
            found.append((stride, size))
    return found


def _within_reach(reduced: list[tuple[int, int]], kept: list[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """The reduced dimensions of the first part of a tensor, if 32-bit indices cannot address the whole.

    PyTorch halves the dimension with the longest way through memory (`with_32bit_indexing`). Simplified here: a tensor
    that it would split along a kept dimension is not split.
    """
    parts = list(reduced)
    while parts and width * sum(stride * (size - 1) for stride, size in [*parts, *kept]) >= LARGEST_INDEX:
        longest = max(range(len(parts)), key=lambda d: parts[d][0] * (parts[d][1] - 1))
        stride, size = parts[longest]
        if size <= 1 or any(stride * (size - 1) < s * (n - 1) for s, n in kept):
            break
        parts[longest] = (stride, size // 2)
    return parts


def _output_vector(kept: list[tuple[int, int]], reduced: list[tuple[int, int]]) -> int:
    # `get_output_vec_size`; the check of the address is left out, since blocks begin at multiples of 512 bytes
    vector = 4
    for number in (kept[0][1], *(stride for stride, _ in [*reduced, *kept[1:]])):
        while number % vector:
            vector //= 2
    return vector


def _block(outer: int, inner: int, most: int) -> tuple[int, int]:
    # `set_block_dimension`
    outer, inner = (min(1 << max(0, n.bit_length() - 1), most) for n in (outer, inner))
    height = min(inner, most // min(outer, WARP))
    return min(outer, most // height), height


def _count(dims: list[tuple[int, int]]) -> int:
    number = 1
    for _, size in dims:
        number *= size
    return number


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)
