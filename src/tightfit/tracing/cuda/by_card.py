"""Scratch memory that depends on the number of multiprocessors of a card, from PyTorch's sources."""

import math
from collections.abc import Sequence

from tightfit.tracing.cuda.allocator import round_up
from tightfit.tracing.cuda.reductions import Card, reduction_scratch
from tightfit.tracing.shapes import TensorShape

Shapes = Sequence[TensorShape]

MANY_ROWS = 64 * 1024  # in `LaunchGammaBetaBackwardCUDAKernel`
MOST_BLOCKS = 64 * 1024 // 2  # same function
MOST_SPLITS = 128  # in `num_splits_heuristic`

_NORMS = {"aten.native_layer_norm_backward.default": 2, "aten._fused_rms_norm_backward.default": 1}
_FLASH = "aten._scaled_dot_product_flash_attention.default"


def scratch_by_card(name: str, inputs: Shapes, outputs: Shapes, arguments: tuple, card: Card) -> list[int]:
    """Bytes of scratch memory of one operator call."""
    if name in _NORMS:
        return _norm_backward(inputs, outputs, _NORMS[name], card)
    if name == _FLASH:
        return _flash_forward(inputs, arguments, card)
    return reduction_scratch(name, inputs, outputs, arguments, card) if inputs else []


def _norm_backward(inputs: Shapes, outputs: Shapes, weights: int, card: Card) -> list[int]:
    # `LaunchGammaBetaBackwardCUDAKernel` in native/cuda/layer_norm_kernel.cu: if there are many short rows, the
    # gradients of weight and bias are summed in blocks of rows, and a reduction adds these sums. The outputs are the
    # gradient of the input, then those of the weights, which have one dimension if the norm is over one dimension.
    gradients = outputs[1 : 1 + weights]
    if not gradients:
        return []
    columns = gradients[0].numel
    rows = inputs[0].numel // max(1, columns)
    if rows <= MANY_ROWS or columns // 32 >= card.multiprocessors // 2:
        return []
    blocks = min(MOST_BLOCKS // -(-columns // 32), -(-rows // 32))
    partial = [TensorShape((blocks, columns), (columns, 1), gradient.dtype) for gradient in gradients]
    last = reduction_scratch("aten.sum.dim_IntList", [partial[-1]], [gradients[-1]], ([0],), card)
    return [*(shape.bytes for shape in partial), gradients[-1].bytes, *last]


def _flash_forward(inputs: Shapes, arguments: tuple, card: Card) -> list[int]:
    # `set_params_splitkv` and `num_splits_heuristic` in flash_attn/flash_api.cpp: if the heads do not fill the card and
    # there is no dropout, the keys are split, and each part has its sums and its output in fp32
    query, key = inputs[:2]
    dropout = next((a for a in arguments if isinstance(a, float)), 0.0)
    if dropout or not query.numel or not key.numel:
        return []
    batch, heads, length, width = query.shape
    key_blocks = -(-key.shape[2] // (256 if width <= 64 else 128 if width <= 128 else 64))
    splits = _splits(batch * heads * -(-length // 64), 2 * card.multiprocessors, key_blocks)
    rows = 4 * splits * batch * heads * length
    return [rows, rows * (round_up(width, 32) if width <= 192 else 256)] if splits > 1 else []


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
