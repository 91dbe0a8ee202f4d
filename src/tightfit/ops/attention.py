"""Scaled dot-product attention without memory for all pairs of positions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import InputError
from tightfit.ops import flex
from tightfit.ops._documents import DocumentAttention, earliest_keys, runs, serves_documents
from tightfit.ops._online_softmax import ChunkedAttention
from tightfit.ops._visibility import Visibility

__all__ = ["attention", "plain_attention"]

# The default size is the fastest of 64 to 1024, measured on one core with 8 heads of 64 and 1024 and 2048 causal
# tokens: forward and backward within 1.2 times the time of PyTorch's fused attention.
DEFAULT_CHUNK_SIZE = 128


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    offset: int = 0,
    scale: float | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute softmax(q kᵀ * scale + mask) v, in memory that grows with the sequence and not with its square.

    Position i sees position j if every given condition allows it. A position that sees nothing gives zeros, and zero
    gradients.

    With a `chunk_size`, scores exist for that many queries and keys at a time, forward and backward: online softmax
    (Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao 2023), summed in fp32 (fp64 for fp64 inputs). With a window,
    time and memory grow with window times sequence. Without a size, the fastest implementation is used:
    `F.scaled_dot_product_attention` if it needs no extra mask, FlexAttention on CUDA for windows and documents without
    a mask, PyTorch's fused kernel per document on a CPU if each document is a run of tokens, else chunks of 128. Except
    for PyTorch's own attention, the result cannot be differentiated twice.

    Args:
        q: (B, Hq, Tq, D), of one floating dtype with k and v.
        k: (B, Hkv, Tk, D). Hq is a multiple of Hkv: each key and value head serves Hq / Hkv consecutive query heads,
            without being repeated.
        v: (B, Hkv, Tk, Dv).
        causal: Allows j <= i.
        window: w allows i - w < j <= i if causal, else |i - j| < w.
        mask: Broadcastable to (B, Hq, Tq, Tk): a boolean mask allows where it is True; a float mask is added to the
            scores.
        document_ids: Integers (B, T): both ids have to be equal.
        offset: Puts the queries at the positions offset + i, for keys from a cache.
        scale: None: 1 / sqrt(D).
        chunk_size: The number of queries and keys at a time.

    Returns:
        (B, Hq, Tq, Dv), in the dtype of q.

    Raises:
        InputError: Shapes, dtypes or options do not fit.

    Example:
        >>> import torch
        >>> from tightfit.ops import attention
        >>> q, k, v = torch.randn(1, 4, 128, 16), torch.randn(1, 2, 128, 16), torch.randn(1, 2, 128, 16)
        >>> plain, chunked = attention(q, k, v, causal=True), attention(q, k, v, causal=True, chunk_size=32)
        >>> torch.allclose(plain, chunked, atol=1e-5)
        True
    """
    check_tensors(q, k, v)
    check_options(q, k, window, mask, document_ids, chunk_size)
    check_offset(offset, document_ids)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    if window is not None and window >= max(offset + q.shape[2], k.shape[2]):
        window = None
    causal = causal and offset + 1 < k.shape[2]
    needs_own_mask = window is not None or document_ids is not None or (causal and (mask is not None or offset > 0))
    if chunk_size is None and not needs_own_mask:
        return fused_attention(q, k, v, causal=causal, mask=mask, scale=scale)
    q, k, v = autocasted(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if chunk_size is None and document_ids is not None and causal and window is None and mask is None:
        # PyTorch's CPU kernel refuses values whose head size differs from the keys'.
        documents = runs(document_ids) if serves_documents(q) and q.shape[-1] == v.shape[-1] else None
        if documents is not None:
            return DocumentAttention.apply(q, k, v, documents, scale)
    if chunk_size is None and mask is None and offset == 0 and flex.serves(q, v):
        return flex.FlexAttention.apply(q, k, v, document_ids, causal, window, scale)
    earliest = earliest_keys(document_ids) if document_ids is not None and serves_documents(q) else None
    visibility = Visibility(causal, window, document_ids, q.shape[1] // k.shape[1], offset, earliest)
    result: Any = ChunkedAttention.apply(q, k, v, mask, visibility, scale, chunk_size or DEFAULT_CHUNK_SIZE)
    return result


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    offset: int = 0,
    scale: float | None = None,
) -> Tensor:
    """The reference: the same attention by a softmax over all pairs of positions."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    i = torch.arange(offset, offset + q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    visible = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        visible = visible & (j <= i)
    if window is not None:
        visible = visible & ((i - j).abs() < window)
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask
        visible = visible & (scores != -torch.inf)
    blind = ~visible.any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~visible, -torch.inf).masked_fill(blind, 0).softmax(dim=-1)
    return weights.masked_fill(blind, 0).to(v.dtype) @ v


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """PyTorch's own attention."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast, if enabled, passes them to PyTorch's own attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    wanted = "q is (B, Hq, Tq, D), k (B, Hkv, Tk, D), v (B, Hkv, Tk, Dv), Hq a multiple of Hkv"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(f"attention: {shapes} are not all of four dimensions: {wanted}")
    one_batch = q.shape[0] == k.shape[0] == v.shape[0]
    if not one_batch or q.shape[3] != k.shape[3] or k.shape[1:3] != v.shape[1:3]:
        raise InputError(f"attention: {shapes} do not fit together: {wanted}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads: {wanted}")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise InputError(f"attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}: give one floating-point dtype")


def check_options(
    q: Tensor,
    k: Tensor,
    window: int | None,
    mask: Tensor | None,
    document_ids: Tensor | None,
    chunk_size: int | None,
) -> None:
    for name, value in (("window", window), ("chunk_size", chunk_size)):
        if value is not None and value < 1:
            raise InputError(f"attention: {name}={value} is less than 1: give a number of positions")
    scores = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask is not None and (mask.dim() > 4 or not broadcastable(mask.shape, scores)):
        raise InputError(f"attention: mask {tuple(mask.shape)} cannot be broadcast to (B, Hq, Tq, Tk) = {scores}")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"attention: mask is {mask.dtype}: give booleans, or floats to be added to the scores")
    if document_ids is not None and (document_ids.shape != (q.shape[0], q.shape[2]) or q.shape[2] != k.shape[2]):
        raise InputError(
            f"attention: document_ids {tuple(document_ids.shape)} for {q.shape[2]} queries and {k.shape[2]} keys: "
            f"give (B, T) = {(q.shape[0], q.shape[2])}, with as many keys as queries"
        )


def check_offset(offset: int, document_ids: Tensor | None) -> None:
    if offset < 0:
        raise InputError(f"attention: offset={offset} is negative: give the position of the first query among the keys")
    if offset and document_ids is not None:
        raise InputError("attention: document_ids do not cover keys before the queries: leave out offset, or the ids")


def broadcastable(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(wanted), strict=False))
