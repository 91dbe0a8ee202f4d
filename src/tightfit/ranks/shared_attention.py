"""Attention of a rank's queries to the keys and values of all ranks, in the place of PyTorch's fused attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tightfit.errors import ModelError
from tightfit.ranks.sequence_parts import SequenceRanks, gathered
from tightfit.ranks.shared_sequence import OR_FSDP2, SharedSequence, on_card

# Tokens meet in these.
_MIXING: frozenset[Any] = frozenset(
    {F.multi_head_attention_forward, torch.cumsum, Tensor.cumsum, torch.roll, Tensor.roll, torch.flip, Tensor.flip}
    | {getattr(module, name) for name in ("conv1d", "conv2d", "conv3d") for module in (torch, F)}
)


class SharedAttention(TorchFunctionMode):
    """A context in which fused attention reads the keys and values of all ranks.

    `path` is that of the block, and `tables` are the identities of tensors that may have an entry for each position.
    Raises `ModelError` for functions in which tokens meet otherwise, and for positions that are counted anew.
    """

    def __init__(self, path: str, shared: SharedSequence, tables: frozenset[int]):
        super().__init__()
        self._path, self._shared, self._tables = path, shared, tables
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._calls += 1
            return self._attend(*args, **kwargs)
        if func in _MIXING:
            raise self._refusal(f"calls {func.__name__}, in which tokens may meet")
        if self._tables and any(id(each) in self._tables for each in args):
            raise self._refusal("reads a table of positions of its own")
        out = func(*args, **kwargs)
        if func is torch.arange and out.numel() == self._shared.part_length:
            raise self._refusal("counts positions itself")
        return out

    def demand_calls(self) -> None:
        """Raise `ModelError` for a block without fused attention."""
        if not self._calls:
            raise self._refusal("calls no torch.nn.functional.scaled_dot_product_attention")

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self._path} {reason}, so ranks cannot share its sequence: {OR_FSDP2}")

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        shared = self._shared
        lengths = {given.shape[-2] for given in (query, key, value)}
        if lengths != {shared.part_length}:
            found = " and ".join(map(str, sorted(lengths)))
            raise self._refusal(f"attends with {found} tokens where a rank has {shared.part_length}")
        keys = gathered(key, shared.ranks)
        values = gathered(value, shared.ranks)
        how: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if is_causal and on_card(query):
            return causal_in_pieces(query, keys, values, shared.ranks, how)
        if is_causal:
            attn_mask = shared.mask
            if attn_mask is None:
                raise self._refusal("is given a mask, and attends without it")
        if attn_mask is not None and attn_mask.shape[-1] != shared.length:
            raise self._refusal(f"makes a mask of shape {tuple(attn_mask.shape)} itself")
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=attn_mask, **how)


def causal_in_pieces(query: Tensor, keys: Tensor, values: Tensor, ranks: SequenceRanks, how: dict[str, Any]) -> Tensor:
    """Causal attention of this rank's two pieces of queries, each to the keys up to its own end."""
    length = query.shape[-2] // 2
    found = []
    for part, piece in zip(query.split(length, -2), ranks.pieces(ranks.number), strict=True):
        end = (piece + 1) * length
        found.append(_ending_alike(part, keys.narrow(-2, 0, end), values.narrow(-2, 0, end), **how))
    return torch.cat(found, -2)


def _ending_alike(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention in which the last query sees the last key: by the flash kernel without a mask, where it runs.

    As `torch.nn.attention.bias.CausalBias` does it, which cannot be made while a dispatch mode is active.
    """
    from torch.backends.cuda import SDPAParams, can_use_flash_attention

    if can_use_flash_attention(SDPAParams(query, key, value, None, dropout_p, False, enable_gqa)):
        width = query.shape[-1]
        missing = -width % 8  # as PyTorch pads for this kernel
        padded = (F.pad(each, (0, missing)) if missing else each for each in (query, key, value))
        scale = width**-0.5 if scale is None else scale
        kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
        return kernel(*padded, dropout_p, True, scale=scale)[0][..., :width]
    if enable_gqa:  # the other fused kernels take no groups
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    queries, keys = query.shape[-2], key.shape[-2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout_p, scale=scale)


def tables_of(block: nn.Module, length: int) -> frozenset[int]:
    """The identities of the buffers of a block that may have an entry for each of its tokens."""
    return frozenset(id(buffer) for buffer in block.buffers() if buffer.dim() and max(buffer.shape) >= length)
