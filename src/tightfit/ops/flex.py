"""Attention within a window or a document on CUDA: PyTorch's FlexAttention as two operators.

FlexAttention is a higher-order operator that must be compiled, and that dispatch modes do not support. As
`tightfit::window_attention` it is an ordinary operator: recompute can replay it, and a dry run needs only its shapes.
Nothing is compiled or imported before a CUDA tensor arrives. Backward runs FlexAttention's forward again, because only
autograd can call its backward. So only q, k and v are saved.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightfit.ops._once import differentiable_once
from tightfit.runtime.internals import as_outside_of_kernels
from tightfit.runtime.simulation import simulation

__all__ = ["BACKWARD", "FORWARD", "FlexAttention", "block_mask", "serves"]

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? document_ids, bool causal, SymInt? window, float scale"
_LIBRARY.define(f"window_attention({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"window_attention_backward(Tensor gradient, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
FORWARD: Any = torch.ops.tightfit.window_attention.default
BACKWARD: Any = torch.ops.tightfit.window_attention_backward.default

BLOCK = 128  # queries and keys in a block of FlexAttention's masks: its default, for which its kernels are tuned
LEAST_WIDTH = 16  # of a head: the smallest size that Triton multiplies


class FlexAttention(torch.autograd.Function):
    """`attention` by position, window and document, without a mask. Saves q, k, v and the ids."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_ids: Tensor | None,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, document_ids)
        ctx.how = causal, window, scale
        return FORWARD(q, k, v, document_ids, causal, window, scale)

    @staticmethod
    @differentiable_once("attention")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = BACKWARD(gradients[0], *ctx.saved_tensors, *ctx.how)
        needed = [part if wanted else None for part, wanted in zip(made, ctx.needs_input_grad, strict=False)]
        return (*needed, None, None, None, None)


def serves(q: Tensor, v: Tensor) -> bool:
    """True if FlexAttention supports these tensors: on CUDA, or in a dry run that simulates CUDA."""
    if not (q.is_cuda or simulation.of_cuda):
        return False
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) and min(q.shape[-1], v.shape[-1]) >= LEAST_WIDTH


# The kernels


def _forward(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, causal: bool, window: int | None, scale: float
) -> Tensor:
    with torch.autocast(q.device.type, enabled=False), as_outside_of_kernels(), torch.no_grad():
        return _attend(q, k, v, document_ids, causal, window, scale)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, *how: Any
) -> tuple[Tensor, ...]:
    # Only autograd reaches FlexAttention's backward, so its forward runs again with a graph of its own.
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.autocast(q.device.type, enabled=False), as_outside_of_kernels(), torch.enable_grad():
        return torch.autograd.grad(_attend(leaves[0], leaves[1], leaves[2], document_ids, *how), leaves, gradient)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, causal: bool, window: int | None, scale: float
) -> Tensor:
    blocks = block_mask(q, k, document_ids, causal, window)
    return compiled_flex_attention()(q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention, compiled, or an error: without its kernel it would materialise the scores of all pairs."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)  # `fullgraph`: a graph break would fall back to eager scores


_LIBRARY.impl("window_attention", _forward, "CUDA")
_LIBRARY.impl("window_attention_backward", _backward, "CUDA")


@torch.library.register_fake("tightfit::window_attention", lib=_LIBRARY)
def _shape(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
    # FlexAttention's output has the memory layout of its query (`infer_dense_strides` in torch/_inductor/kernel/flex).
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.register_fake("tightfit::window_attention_backward", lib=_LIBRARY)
def _shapes_of_gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# Visibility


def block_mask(q: Tensor, k: Tensor, document_ids: Tensor | None, causal: bool, window: int | None) -> Any:
    """A `BlockMask` for q (B, Hq, Tq, D) and k (B, Hkv, Tk, D), from positions and ids.

    PyTorch's `create_block_mask` evaluates all pairs. Here the distance of two blocks' ends decides, and the ranges of
    their document ids: if the ranges do not overlap, no two ids are equal.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = q.shape[2], k.shape[2]
    seen, full = _by_position(queries, keys, causal, window, q.device)
    if document_ids is not None:
        seen = seen & _documents_may_meet(document_ids)
        full = torch.zeros_like(full)
    return BlockMask.from_kv_blocks(
        *_table(seen & ~full),
        *_table(seen & full) if document_ids is None else (None, None),
        BLOCK_SIZE=BLOCK,
        mask_mod=_visible(document_ids, causal, window),
        seq_lengths=(queries, keys),
    )


def _by_position(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Two booleans (1, query blocks, key blocks): whether any pair of a block is visible, and whether all pairs of a
    whole block are.
    """
    q0 = torch.arange(0, queries, BLOCK, device=device)[:, None]
    k0 = torch.arange(0, keys, BLOCK, device=device)
    q1, k1 = (q0 + BLOCK).clamp(max=queries), (k0 + BLOCK).clamp(max=keys)
    # The distance i - j within a block is between these two.
    least, most = q0 - (k1 - 1), q1 - 1 - k0
    seen = torch.ones_like(least, dtype=torch.bool)
    full = (q0 + BLOCK <= queries) & (k0 + BLOCK <= keys)
    if causal:
        seen, full = seen & (most >= 0), full & (least >= 0)
    if window is not None:
        seen, full = seen & (least < window), full & (most < window)
        if not causal:
            seen, full = seen & (-most < window), full & (-least < window)
    return seen[None], full[None]


def _documents_may_meet(document_ids: Tensor) -> Tensor:
    """(B, blocks, blocks): whether the ranges of two blocks' ids overlap."""
    missing = -document_ids.shape[1] % BLOCK
    last = document_ids[:, -1:].expand(-1, missing)
    blocks = torch.cat((document_ids, last), dim=1).unflatten(1, (-1, BLOCK))
    lowest, highest = blocks.amin(dim=2), blocks.amax(dim=2)
    return (lowest[:, :, None] <= highest[:, None, :]) & (lowest[:, None, :] <= highest[:, :, None])


def _table(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the number of visible blocks (B, 1, rows), and the indices of blocks, visible ones first (B, 1,
    rows, columns).
    """
    blocks = blocks[:, None]
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def _visible(document_ids: Tensor | None, causal: bool, window: int | None) -> Callable[..., Tensor]:
    """FlexAttention's `mask_mod`: whether the pair (i, j) in batch row b is visible."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i) if causal else (j >= 0)
        if window is not None:
            seen = seen & (i - j < window)
            if not causal:
                seen = seen & (j - i < window)
        if document_ids is not None:
            seen = seen & (document_ids[b, i] == document_ids[b, j])
        return seen

    return sees
