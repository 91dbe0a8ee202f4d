"""Chooses the attention kernel that CUDA would choose, and calls its operator.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend` and the constraints of each
backend), sdp_utils_cpp.h, and attention.cpp (`scaled_dot_product_attention`), torch 2.11 to 2.13 as built for CUDA 13,
whose cuDNN is preferred on Hopper and data-centre Blackwell (`check_prefer_cudnn_attention`).
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tightfit.runtime.internals import (
    attention_priority,
    cudnn_attention_is_preferred,
    dispatch_modes,
    installed_release,
)
from tightfit.tracing.rules import inside
from tightfit.tracing.shapes import KNOWN_LIMIT

aten = torch.ops.aten
Capability = tuple[int, int]


class Backend(enum.StrEnum):
    """A kernel of scaled dot product attention, named as in `torch.nn.attention.SDPBackend`."""

    CUDNN = "cudnn_attention"
    FLASH = "flash_attention"
    EFFICIENT = "efficient_attention"
    MATH = "math"


_HALF = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)  # the highest capability that the fused kernels are built for


@dataclass(frozen=True)
class AttentionCall:
    """The call on which the choice depends: q (B, Hq, Tq, D), k and v (B, Hkv, Tk, D), and the options."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False  # `enable_gqa`

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def may_be_known(self) -> bool:
        """True if the inputs are small and need no gradient. Their numbers may then be known, so that the model may
        branch on the result, and only the math kernel can compute it on a CPU.
        """
        return not self.needs_gradient and max(t.numel() for t in self.tensors) <= KNOWN_LIMIT

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def choose_backend(call: AttentionCall, capability: Capability) -> Backend:
    """The first backend that supports the call, in the present order of preference.

    `torch.nn.attention.sdpa_kernel` changes that order, and `torch.backends.cuda` disables single backends.
    """
    takes = {
        Backend.CUDNN: _cudnn_takes,
        Backend.FLASH: flash_takes,
        Backend.EFFICIENT: efficient_takes,
        Backend.MATH: lambda call, capability: True,
    }
    for name in _preferred(capability):
        if name in takes and takes[Backend(name)](call, capability):
            return Backend(name)
    return Backend.MATH


def _preferred(capability: Capability) -> list[str]:
    names, is_default = attention_priority()
    prefers_cudnn = capability[0] in (9, 10) and is_default and cudnn_attention_is_preferred()
    ordered = [Backend.CUDNN.value, *names] if prefers_cudnn and Backend.CUDNN in names else names
    return list(dict.fromkeys(ordered))


# The constraints of each backend


# `check_cudnn_dropout`: its probabilities are multiples of 1/16. 2.12.0 has the check, 2.11.0 does not.
_DROPOUT_CHECKED = (2, 12)


def _cudnn_takes(call: AttentionCall, capability: Capability) -> bool:
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    return (
        _is_four_dimensional(call)
        and (8, 0) <= capability <= _NEWEST
        and _has_dtype(call, _HALF)
        and _mask_is_plain(call)
        and not torch.are_deterministic_algorithms_enabled()
        and (installed_release() < _DROPOUT_CHECKED or (call.dropout * 16).is_integer())
        and _heads_agree(call, takes_grouped=True)
        and _last_stride_is_one(call, ignore_single=True)
        and _cudnn_takes_widths(width, value_width, capability)
        and call.key.shape[-2] != 1
        and not (call.dropout > 0 and call.query.shape[-2] == 1)
    )


def _cudnn_takes_widths(width: int, value_width: int, capability: Capability) -> bool:
    # `check_cudnn_tensor_shapes`; the pair of widths on (10, x) is that of multi-head latent attention
    most = 256 if capability == (9, 0) else 128
    is_pair = capability[0] == 10 and (width, value_width) == (192, 128)
    return (max(width, value_width) <= most or is_pair) and width % 8 == value_width % 8 == 0


def flash_takes(call: AttentionCall, capability: Capability) -> bool:
    """True if the flash kernel supports a call (`can_use_flash_attention`)."""
    width = call.query.shape[-1]
    return (
        _is_four_dimensional(call)
        and call.mask is None
        and width == call.key.shape[-1] == call.value.shape[-1] <= 256
        and (8, 0) <= capability <= _NEWEST
        and _flash_backward_takes(call, capability)
        and not (call.causal and call.query.shape[-2] != call.key.shape[-2])
        and _has_dtype(call, _HALF)
        and _heads_agree(call, takes_grouped=True)
        and _last_stride_is_one(call, ignore_single=True)
    )


def _flash_backward_takes(call: AttentionCall, capability: Capability) -> bool:
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`: too little shared memory there
    width = call.query.shape[-1]
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return not (small and call.needs_gradient) or width <= 192 or (width > 224 and call.dropout == 0)


# `check_batch_size_and_num_heads_dense` of the memory-efficient kernel: groups of heads since 2.14.0.
_EFFICIENT_IS_GROUPED = (2, 14)


def efficient_takes(call: AttentionCall, capability: Capability) -> bool:
    """True if the memory-efficient kernel supports a call (`can_use_mem_efficient_attention`)."""
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    alignment = gemm_alignment(call.query.dtype, capability)
    dtypes = (*_HALF, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
    return (
        _is_four_dimensional(call)
        and (5, 0) <= capability <= _NEWEST
        and width == call.key.shape[-1]
        and width % alignment == value_width % alignment == 0
        and _has_dtype(call, dtypes)
        and _heads_agree(call, takes_grouped=installed_release() >= _EFFICIENT_IS_GROUPED)
        and _last_stride_is_one(call, ignore_single=False)
    )


def gemm_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """The number of elements to which CUTLASS requires the head width to be aligned (`minimum_gemm_alignment`)."""
    is_half = dtype in _HALF
    uses_tensor_cores = capability[0] >= 8 or (capability[0] == 7 and is_half)
    least = 4 if capability[0] >= 8 else 1
    return max(least, 128 // (16 if is_half else 32)) if uses_tensor_cores else least


def _is_four_dimensional(call: AttentionCall) -> bool:
    return all(t.dim() == 4 and t.shape[-2] > 0 for t in call.tensors)


def _has_dtype(call: AttentionCall, dtypes: Sequence[torch.dtype]) -> bool:
    return call.query.dtype in dtypes and call.query.dtype == call.key.dtype == call.value.dtype


def _mask_is_plain(call: AttentionCall) -> bool:
    # `check_attn_mask_shape`
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (*call.query.shape[:3], call.key.shape[-2])[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, wanted, strict=True))


def _heads_agree(call: AttentionCall, *, takes_grouped: bool) -> bool:
    # `check_batch_size_and_num_heads_dense`
    if len({t.shape[0] for t in call.tensors}) != 1:
        return False
    heads, key_heads, value_heads = (t.shape[1] for t in call.tensors)
    if call.grouped and takes_grouped:
        return key_heads == value_heads and heads % key_heads == 0
    return heads == key_heads == value_heads


def _last_stride_is_one(call: AttentionCall, *, ignore_single: bool) -> bool:
    single = ignore_single and call.query.shape[-1] == 1
    mask_fits = call.mask is None or call.mask.stride(-1) == 1 or (ignore_single and call.mask.shape[-1] == 1)
    return (single or all(t.stride(-1) == 1 for t in call.tensors)) and mask_fits


# The calls


def attend(capability: Capability, call: AttentionCall, scale: float | None) -> Tensor:
    """Attention as CUDA would compute it: the operator of the chosen kernel, with inputs padded as it requires."""
    backend = choose_backend(call, capability)
    if backend is Backend.MATH or call.may_be_known:
        # It adds its mask in place unless a dispatch mode is active (`areAnyTensorSubclassLike`): a lever's is in
        # the real step too, and the dry run's own is not.
        outer, inside.operator, inside.adds_in_place = inside.operator, True, dispatch_modes() == 1
        try:
            result = aten._scaled_dot_product_attention_math.default(
                *call.tensors, _as_bias(call), call.dropout, call.causal, scale=scale, enable_gqa=call.grouped
            )
        finally:
            inside.operator = outer
        return result[0]
    if backend is Backend.FLASH:
        return flash(call, scale)
    mask = _as_bias(call)
    if backend is Backend.CUDNN:
        return aten._scaled_dot_product_cudnn_attention.default(
            *call.tensors, mask, call.needs_gradient, call.dropout, call.causal, False, scale=scale
        )[0]
    if mask is not None:
        mask = _aligned(mask).expand(*call.query.shape[:3], call.key.shape[-2])
    return aten._scaled_dot_product_efficient_attention.default(
        *call.tensors, mask, call.needs_gradient, call.dropout, call.causal, scale=scale
    )[0]


def flash(call: AttentionCall, scale: float | None) -> Tensor:
    """The operator of the flash kernel."""
    # Head widths are padded to a multiple of 8 (`pad_last_dim<8, false>`, attention.cpp)
    width = call.query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    missing = -width % 8
    q, k, v = (pad(t, (0, missing)) if missing else t for t in call.tensors)
    result: Any = aten._scaled_dot_product_flash_attention.default(q, k, v, call.dropout, call.causal, scale=scale)
    return result[0][..., :width] if missing else result[0]


def _as_bias(call: AttentionCall) -> Tensor | None:
    # `convert_boolean_attn_mask`
    mask = call.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, out = (torch.scalar_tensor(x, dtype=call.query.dtype) for x in (0.0, -math.inf))
    return torch.where(mask, zero, out)


def _aligned(mask: Tensor) -> Tensor:
    # `preprocess_mask`: rows of the mask are padded to multiples of 8 elements
    length = mask.shape[-1]
    return pad(mask, (0, -length % 8))[..., :length] if length % 8 else mask
