"""Scratch memory of CUDA's kernels and libraries, each with its purpose and its place in PyTorch's sources."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tightfit.tracing.cpu_temporaries import COMPOSITES, composite_scratch
from tightfit.tracing.cuda import convolutions, copies, networks, normalisation, transforms
from tightfit.tracing.cuda.allocator import MIB, MIN_BLOCK, RESULT, Scratch, round_up
from tightfit.tracing.shapes import TensorShape, lies_by_length

Shapes = Sequence[TensorShape]
_THREE_RESULTS = [RESULT] * 3  # gradients of query, keys and values
_SORTED_BY_ONE_BLOCK = 2048

# The memory of a process on the device before its first tensor: the driver's context and the loaded kernels. This is an
# assumption, not a measurement.
CONTEXT_BYTES = 512 * MIB


def cuda_workspace(name: str, inputs: Shapes, outputs: Shapes, arguments: tuple) -> Scratch:
    """Bytes of scratch memory of one operator call, rounded as the allocator does. For products see `products.py`."""
    formula = _FORMULAS.get(name)
    if formula is None or math.prod(inputs[0].shape) == 0:
        return Scratch.of(())
    return Scratch.of(formula(inputs, outputs, arguments))


# Attention backward. The inputs are: gradient, query, key, value, out, logsumexp (efficient: the bias before out).


def _flash_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `mha_bwd` in flash_attn/flash_api.cpp: sums of out times its gradient, and the gradient of the query in fp32. If
    # heads share keys, also the gradients of keys and values for every head. `_flash_attention_backward` in
    # attention_backward.cu: copies of gradient and output unless they are laid out as (batch, length, heads, width).
    gradient, query, key, _, out = inputs[:5]
    batch, heads, length, width = query.shape
    rows = round_up(length, 128)
    rounded = round_up(width, 32 if width <= 128 else 64)
    shared = heads != key.shape[1]
    expanded = batch * heads * key.shape[2] * width * query.dtype.itemsize
    copies = [shape.bytes for shape in (gradient, out) if not lies_by_length(shape)]
    sums = [4 * batch * heads * rows, 4 * batch * heads * rows * rounded]
    return [*copies, *_THREE_RESULTS, *sums, *([expanded] * 2 if shared else [])]


def _joined_flash_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `mha_varlen_bwd`, same file: the same for sequences that are joined to one (T, H, D), each with 128 rows more
    gradient, query, key, _, out = inputs[:5]
    queries, heads, width = query.shape
    sequences = next((shape.numel for shape in inputs[5:] if not shape.dtype.is_floating_point), 1) - 1
    rows = queries + 128 * sequences
    rounded = round_up(width, 32 if width <= 128 else 64)
    expanded = key.shape[0] * heads * width * query.dtype.itemsize
    copies = [shape.bytes for shape in (gradient, out) if not shape.is_contiguous]
    sums = [4 * heads * rows, 4 * heads * rows * rounded]
    return [*copies, *_THREE_RESULTS, *sums, *([expanded] * 2 if heads != key.shape[1] else [])]


# What cuDNN's engine for attention takes itself is not public. On an H200 (torch 2.11.0, 50 calls of
# tests/card/test_operators.py) it is one block of 512 bytes beside the forward's results, and moves the backward's
# buffer, by whose rounding it is more than 192 and at most 512 bytes.
CUDNN_ENGINE = 512


def _cudnn_forward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    return [*[RESULT] * len(outputs), CUDNN_ENGINE]


def _cudnn_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # One buffer. `get_fe_workspace_size_node` of the backward node in cudnn-frontend's
    # scaled_dot_product_flash_attention.h
    query, key, value = inputs[1:4]
    batch, heads, length, width = query.shape
    sums, gradient = 4 * batch * heads * length, 4 * batch * heads * length * width
    if heads == key.shape[1]:
        return [sums + gradient + CUDNN_ENGINE]
    # Gradients of keys and values for every head, which the frontend leaves to the engine: in 16 bits, as on the H200.
    return [sums + gradient + CUDNN_ENGINE + 2 * batch * heads * key.shape[2] * (key.shape[3] + value.shape[3])]


def _efficient_forward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `kNeedsOutputAccumulatorBuffer` in mem_eff_attention/kernel_forward.h: if values are wider than a block of keys
    # (at most 128), a 16-bit result is summed in an fp32 buffer
    query, value = inputs[0], inputs[2]
    batch, heads, length, _ = query.shape
    is_needed = query.dtype.itemsize == 2 and value.shape[3] > 128
    return [4 * batch * heads * length * value.shape[3]] if is_needed else []


def _window_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # FlexAttention runs its forward again, with the log-sum-exp and the maximum of each row. Its backward adds delta,
    # the sums of out times its gradient (torch/_inductor/kernel/flex/flex_attention.py).
    query, value = inputs[1], inputs[3]
    rows = math.prod(query.shape[:3])
    return [rows * value.shape[3] * query.dtype.itemsize, 4 * rows, 4 * rows, 4 * rows]


def _flex_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # delta, the sums of out times its gradient (torch/_inductor/kernel/flex/flex_attention.py)
    return [4 * math.prod(inputs[1].shape[:3])]


# Others


def _embedding(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `embedding_symint` in native/Embedding.cpp: `indices.reshape(-1)`, a copy of positions that a batch shares
    index = inputs[1]
    return [] if len(index.shape) < 2 or index.is_contiguous else [index.bytes, RESULT]


def _embedding_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # Embedding.cu (`embedding_dense_backward_cuda`) and EmbeddingBackwardKernel.cu: contiguous copies of gradient and
    # indices; sorted indices, and buffers of the sort; sums over runs of up to ten rows in fp32. The number of runs is
    # read from the device, so it is the most that is possible. Few indices use another kernel, which needs only the
    # copies.
    count, (weights, width) = inputs[1].numel, outputs[0].shape
    copied = [shape.bytes for shape in inputs[:2] if not shape.is_contiguous]
    if count <= 3072:
        return [*copied, RESULT]
    indices = inputs[1].dtype.itemsize * count
    sort = _radix_sort(count, weights, inputs[1].dtype.itemsize)
    segments = min(count, weights)
    runs = count // 10 + segments
    in_segments = inputs[1].dtype.itemsize * segments
    before = [*copied, indices, indices, indices, *sort, *(-size for size in sort), -indices, RESULT]
    found = [indices, 512, indices, -indices, in_segments, in_segments, 512]
    return [*before, *found, inputs[1].dtype.itemsize * runs, 4 * runs * width]


def _radix_sort(count: int, largest: int, key: int = 8) -> list[int]:
    # cub's radix sort of `count` keys below `largest`, with numbers of 64 bits: counts of the digits of each pass of
    # eight bits and of each tile; second buffers of both if there are several passes. Few keys are sorted by one block.
    # 3,840 keys a tile are those of capability 8 and 9.
    if count <= _SORTED_BY_ONE_BLOCK:
        return [MIN_BLOCK]
    passes = -(-largest.bit_length() // 8)
    buffers = (key + 8) * count if passes > 1 else 0
    return [buffers + 2048 * passes + 1024 * -(-count // 3840) + MIN_BLOCK]


def _index_put(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `index_put_with_sort_kernel` in Indexing.cu, only if values accumulate: a copy of the values if they are not
    # contiguous; linear, sorted and original indices; the numbers sorted with them; the sort's second buffers of both
    accumulates = next((a for a in arguments if isinstance(a, bool)), False)
    places = [shape.numel for shape in inputs[1:] if not shape.dtype.is_floating_point]
    if not accumulates or not places:
        return []
    values, count = inputs[-1], max(places)
    copied = [] if values.is_contiguous else [values.bytes]
    rows = math.prod(inputs[0].shape[: len(places)])  # the first dimensions are those that are indexed, as a rule
    return [*copied, 8 * count, 8 * count, -8 * count, *[8 * count] * 3, *_radix_sort(count, rows)]


def _sort(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `do_launch_stable_sort_kernel` in SortStable.cu; up to 4096 numbers (`should_use_small_sort` in Sort.h) are sorted
    # in the memory of the results, with one row of places. Of several long rows, small buffers are left out.
    source = inputs[0]
    length = source.shape[next((a for a in arguments if type(a) is int), -1)]
    key, number, rows = source.dtype.itemsize, source.numel, source.numel // length
    if length <= 4096:
        return [8 * length]
    if rows == 1:
        return [8 * length, *_radix_sort(length, 2 ** (8 * key) - 1, key)]
    if rows < 128:
        return [8 * number, 8 * number, key * number, (key + 8) * number]
    return [8 * number, (key + 8) * number]


def _scan(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `impl_func_cum_ops` in native/ReduceOps.cpp: the input in the dtype of the result; ScanKernels.cpp: contiguous
    source, result = inputs[0], outputs[0]
    converted = source.dtype != result.dtype
    if converted or not source.is_contiguous:
        # What lies densely in another order still does so in the other dtype.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride, strict=True))
        copies = 2 if converted and not source.is_contiguous and extent == source.numel else 1
        return [source.numel * result.dtype.itemsize] * copies
    # `launch_cumsum_cuda_kernel` in ScanKernels.cpp: cub scans one row, and each tile of 1,024 numbers tells the next
    tiles = 32 + -(-source.numel // 1024)
    width = source.dtype.itemsize
    is_row = source.numel == max(source.shape, default=1) and source.dtype in (torch.int32, torch.int64)
    return [round_up(4 * tiles, 256) + 2 * round_up(width * tiles, 256) + 255] if is_row else []


def _made_contiguous(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `nonzero_cuda_out_impl` in Nonzero.cu; `nll_loss_forward_out_cuda_template` and the one for backward in Loss.cu
    return [shape.bytes for shape in inputs if not shape.is_contiguous]


def _log_sum_exp(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `logsumexp_out_impl` in native/ReduceOps.cpp: the maxima twice, where they are infinite, and the exponentials
    row, places = outputs[0].bytes, outputs[0].numel
    return [row, row, places, -places, -row, inputs[0].bytes, RESULT]


def _composite(name: str, inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    is_copied = name == "aten._safe_softmax.default" and not inputs[0].is_contiguous  # by `_softmax` within it
    return [*([inputs[0].bytes] if is_copied else []), *composite_scratch(name, inputs, outputs, arguments)]


def _foreach_norm(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `foreach_tensor_norm_cuda` in ForeachReduceOp.cu: for every tensor, as many numbers as the longest tensor has
    # chunks of 65,536 elements
    return [4 * len(inputs) * -(-max(shape.numel for shape in inputs) // 65536), *[RESULT] * len(outputs)]


def _ctc(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `ctc_loss_gpu_template` in cuda/LossCTC.cu: both lengths, and the offset of each target, on the device. cuDNN's
    # loss is not simulated; PyTorch uses it for fp32 with joined targets and lengths given as numbers.
    batch = inputs[0].shape[1]
    return [8 * batch] * 3


def _ctc_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `ctc_loss_backward_gpu_template`, same file: the same three, and the sums from the other end (`log_beta`)
    return [inputs[-1].bytes, *_ctc(inputs[1:], outputs, arguments)]


def _soft_margin_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `soft_margin_loss_backward_out` in native/Loss.cpp: exp(-target * input), and what it is computed from
    one = outputs[0].bytes
    return [one, one, one, -one, -one, RESULT]


def _distances_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `cdist_backward_kernel_impl`, `pdist_backward_kernel_impl` in cuda/DistanceKernel.cu: the gradient of every pair.
    # The inputs are: gradient, rows (two of them for `cdist`), distances.
    pairs = inputs[0].numel if len(inputs) == 4 else (inputs[1].shape[0] - 1) * inputs[1].shape[0]
    copied = [shape.bytes for shape in inputs[1:3] if len(inputs) == 4 and not shape.is_contiguous]
    return [*copied, RESULT, pairs * inputs[1].shape[-1] * inputs[1].dtype.itemsize]


_FORMULAS: dict[str, Callable[[Shapes, Shapes, tuple], list[int]]] = {
    **convolutions.FORMULAS,
    **copies.FORMULAS,
    **networks.FORMULAS,
    **normalisation.FORMULAS,
    **transforms.FORMULAS,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._flash_attention_backward.default": _joined_flash_backward,
    "aten._scaled_dot_product_cudnn_attention.default": _cudnn_forward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_forward,
    "tightfit.window_attention_backward.default": _window_backward,
    "tightfit.flex_attention_backward.default": _flex_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._index_put_impl_.default": _index_put,
    "aten.index_put_.default": _index_put,
    "aten.index_put.default": _index_put,
    "aten._foreach_norm.Scalar": _foreach_norm,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.nonzero.default": _made_contiguous,
    "aten.nll_loss_forward.default": _made_contiguous,
    "aten.nll_loss_backward.default": _made_contiguous,
    "aten.cumsum.default": _scan,
    "aten.cumprod.default": _scan,
    **{name: partial(_composite, name) for name in COMPOSITES},
    "aten.logsumexp.default": _log_sum_exp,
    "aten.soft_margin_loss_backward.default": _soft_margin_backward,
    "aten._cdist_backward.default": _distances_backward,
    "aten._pdist_backward.default": _distances_backward,
    "aten._ctc_loss.default": _ctc,
    "aten._ctc_loss.Tensor": _ctc,
    "aten._ctc_loss_backward.default": _ctc_backward,
    "aten._ctc_loss_backward.Tensor": _ctc_backward,
}
