"""Scratch memory that depends on the number of multiprocessors of a card, from PyTorch's sources."""

import math
from collections.abc import Sequence

import torch

from tightfit.tracing.cuda.allocator import RESULT, round_up
from tightfit.tracing.cuda.answers import shared_memory
from tightfit.tracing.cuda.convolutions import BACKWARD, CONVOLUTION, convolution_scratch
from tightfit.tracing.cuda.normalisation import copies
from tightfit.tracing.cuda.reductions import LaunchLimits, reduction_scratch
from tightfit.tracing.shapes import TensorShape, contiguous, lies_by_length

Shapes = Sequence[TensorShape]

MANY_ROWS = 64 * 1024  # in `LaunchGammaBetaBackwardCUDAKernel`
MOST_BLOCKS = 64 * 1024 // 2  # same function
MOST_SPLITS = 128  # in `num_splits_heuristic`

_NORMS = {"aten.native_layer_norm_backward.default": 2, "aten._fused_rms_norm_backward.default": 1}
_EFFICIENT_BACKWARD = "aten._scaled_dot_product_efficient_attention_backward.default"
_FLASH = "aten._scaled_dot_product_flash_attention.default"
# Losses of every number, which a mean or a sum reduces. The blocks before it; None stands for the unreduced loss.
_LOSSES = {
    "aten.mse_loss.default": (RESULT, None),  # `mse_loss_out`, `smooth_l1_loss_out` in native/Loss.cpp
    "aten.smooth_l1_loss.default": (RESULT, None),
    "aten.huber_loss.default": (None, RESULT),  # `huber_loss`, `binary_cross_entropy_with_logits`, same file
    "aten.binary_cross_entropy_with_logits.default": (None, None, RESULT),
    "aten.binary_cross_entropy.default": (RESULT, 4),  # `binary_cross_entropy_out_cuda` in cuda/Loss.cu
    "aten.soft_margin_loss.default": (RESULT, 4),  # `soft_margin_loss_out` in native/Loss.cpp
}


def scratch_by_card(name: str, inputs: Shapes, outputs: Shapes, arguments: tuple, card: LaunchLimits) -> list[int]:
    """Bytes of scratch memory of one operator call."""
    if name in _NORMS:
        return _norm_backward(inputs, outputs, _NORMS[name], card)
    if name == _FLASH:
        return _flash_forward(inputs, arguments, card)
    if name in _LOSSES:
        return _loss(name, inputs, outputs[0], card)
    if name in (CONVOLUTION, BACKWARD):
        return convolution_scratch(name, inputs, arguments, card)
    if name == _EFFICIENT_BACKWARD:
        return _efficient_backward(inputs, card)
    return reduction_scratch(name, inputs, outputs, arguments, card) if inputs else []


def _loss(name: str, inputs: Shapes, result: TensorShape, card: LaunchLimits) -> list[int]:
    sizes = torch.broadcast_shapes(inputs[0].shape, inputs[1].shape)
    every, before = contiguous(sizes, result.dtype), _LOSSES[name]
    if result.shape:
        return [every.bytes, RESULT] if before.count(None) > 1 else []
    reduced = reduction_scratch("aten.sum.default", [every], [result], (), card)
    return [*(every.bytes if size is None else size for size in before), *reduced]


def _norm_backward(inputs: Shapes, outputs: Shapes, weights: int, card: LaunchLimits) -> list[int]:
    # `LaunchGammaBetaBackwardCUDAKernel` in native/cuda/layer_norm_kernel.cu: if there are many short rows, the
    # gradients of weight and bias are summed in blocks of rows, and a reduction adds these sums. The outputs are the
    # gradient of the input (see `normalisation.py`), then those of the weights, which have one dimension if the norm is
    # over one dimension. `LayerNormBackwardKernelImpl`, `RMSNormBackwardKernelImpl`: `dY.contiguous()`
    gradients, each = outputs[1 : 1 + weights], [*[RESULT] * len(outputs[1:]), *copies(inputs[0])]
    if not gradients:
        return each
    columns = gradients[0].numel
    rows = inputs[0].numel // max(1, columns)
    if rows <= MANY_ROWS or columns // 32 >= card.multiprocessors // 2:
        return each
    blocks = min(MOST_BLOCKS // -(-columns // 32), -(-rows // 32))
    partial = [TensorShape((blocks, columns), (columns, 1), gradient.dtype) for gradient in gradients]
    last = reduction_scratch("aten.sum.dim_IntList", [partial[-1]], [gradients[-1]], ([0],), card)
    begun = [*(shape.bytes for shape in gradients), *copies(inputs[0])]
    begun += [*(shape.bytes for shape in partial), RESULT, *last]
    if len(gradients) == 1:
        return begun
    return [*begun, *(-size for size in reversed(last)), -gradients[0].bytes, RESULT, *last]


def _flash_forward(inputs: Shapes, arguments: tuple, card: LaunchLimits) -> list[int]:
    # `set_params_splitkv` and `num_splits_heuristic` in flash_attn/flash_api.cpp: if the heads do not fill the card and
    # there is no dropout, the keys are split, and each part has its sums and its output in fp32. With dropout, the
    # generator's state goes through a buffer.
    query, key = inputs[:2]
    if not query.numel or not key.numel:
        return []
    if next((a for a in arguments if isinstance(a, float)), 0.0):
        return [RESULT, RESULT, 8, RESULT, RESULT]
    batch, heads, length, width = query.shape
    key_blocks = -(-key.shape[2] // (256 if width <= 64 else 128 if width <= 128 else 64))
    splits = _splits(batch * heads * -(-length // 64), 2 * card.multiprocessors, key_blocks)
    rows = 4 * splits * batch * heads * length
    parts = [rows, rows * (round_up(width, 32) if width <= 192 else 256)]
    return [RESULT, RESULT, *parts, RESULT, RESULT] if splits > 1 else []


def _efficient_backward(inputs: Shapes, card: LaunchLimits) -> list[int]:
    # `workspace_size` in mem_eff_attention/kernel_backward.h: the gradient of the query in fp32, in tiles with a header
    # of 16 bytes each. Kernels that do not sum the gradients of keys and values in registers have those in fp32 too.
    # And delta, the sum of each row of out times its gradient, which 16-bit kernels compute themselves. Before these, a
    # copy of a gradient that does not lie as (batch, length, heads, width) (`_efficient_attention_backward`).
    gradient, query, key, value = inputs[:4]
    batch, heads, length, width = query.shape
    is_half, widest = query.dtype.itemsize == 2, max(width, value.shape[3])
    tile_rows, tile_columns, has_sums = _efficient_kernel(widest, is_half, card.capability)
    tiles = -(-length // tile_rows) * -(-width // tile_columns)
    elements = tiles * (4 + tile_rows * tile_columns)
    if has_sums:
        keys = round_up(key.shape[2], tile_columns)
        elements += keys * (round_up(width, tile_rows) + round_up(value.shape[3], tile_rows))
    rows, product = 4 * batch * heads * length, 4 * batch * heads * length * value.shape[3]
    delta = [rows] if is_half else [product, rows, rows, -rows, -product]
    copied = [] if lies_by_length(gradient) else [gradient.bytes]
    # Heads in groups (since 2.14): gradients of keys and values for each of the query's heads, added up at the end.
    each_head = key.dtype.itemsize * batch * heads * key.shape[2]
    of_heads = [] if key.shape[1] == heads else [each_head * width, each_head * value.shape[3]]
    return [*copied, *[RESULT] * 3, *of_heads, *delta, 4 * batch * heads * round_up(elements, 4)]


def _efficient_kernel(width: int, is_half: bool, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """kBlockSizeI and kBlockSizeJ of the first kernel in cutlassB.h for a width that a card's shared memory holds, and
    whether it has sums of its own for the gradients of keys and values. Compared with the wheel 2.13 for all widths.
    """
    has_much_shared_memory = capability[0] >= 8 and shared_memory(capability) >= 160 * 1024
    if width <= 64 or (not is_half and not has_much_shared_memory):
        return 64, 64, False
    if is_half and 96 < width <= 128:
        if has_much_shared_memory:
            return 128, 128, False
        return (64, 64, True) if capability[0] >= 8 else (128, 64, False)
    return 128, 64, is_half and width > 128


def _splits(blocks: int, slots: int, key_blocks: int) -> int:
    if blocks >= 0.8 * slots:
        return 1
    counts = [
        n
        for n in range(1, min(MOST_SPLITS, slots, key_blocks) + 1)
        if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))
    ]
    efficiency = {n: blocks * n / slots / math.ceil(blocks * n / slots) for n in counts}
    best = max(efficiency.values())
    return next(n for n in counts if efficiency[n] >= 0.85 * best)
