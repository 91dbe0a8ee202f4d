"""Composite operators that branch on whether their tensors are on CUDA, with CUDA's branch.

These kernels replace those of autograd's key, above everything that a dry run sees. So the dry run sees CUDA's
operators and CUDA's saved tensors.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tightfit.tracing.cuda import networks
from tightfit.tracing.cuda.attention import AttentionCall, Capability, attend
from tightfit.tracing.shapes import KNOWN_LIMIT

aten = torch.ops.aten


def composites(capability: Capability) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Qualified operator names, dispatch keys and kernels of a device of this capability."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        return attend(capability, call, scale)

    yield "aten::scaled_dot_product_attention", "AutogradCPU", scaled_dot_product_attention
    yield "aten::rms_norm", "AutogradCPU", _rms_norm
    yield "aten::dropout", "AutogradCPU", _dropout
    yield "aten::log_softmax.int", "AutogradCPU", _log_softmax
    yield "aten::softmax.int", "AutogradCPU", _softmax
    yield from networks.composites()
    if hasattr(aten, "_fused_rms_norm"):
        # With a CPU kernel the operator uses autograd's formula. Without one, PyTorch decomposes it.
        yield "aten::_fused_rms_norm", "CPU", _never_computed


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    # `rms_norm_symint` in layer_norm.cpp: fused, unless the weight has another dtype than the input. Small inputs
    # without a gradient are an exception of ours: their numbers may be known, and no CPU can run the fused operator.
    has_gradient = torch.is_grad_enabled() and (input.requires_grad or (weight is not None and weight.requires_grad))
    is_fused = hasattr(aten, "_fused_rms_norm") and (weight is None or weight.dtype == input.dtype)
    if is_fused and (has_gradient or input.numel() > KNOWN_LIMIT):
        return aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    dims = list(range(-len(normalized_shape), 0))
    wide = input.float() if input.dtype.itemsize == 2 else input
    normed = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).type_as(input)


def _never_computed(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a dry run never computes this operator")


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    # `is_fused_kernel_acceptable` in Dropout.cpp: the mask is kept as booleans
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype)
    return aten.native_dropout.default(input, p, train)[0]


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if _widens_half(input, dtype):
        return aten._log_softmax.default(input, dim, True)
    return aten._log_softmax.default(input if dtype is None else input.to(dtype), dim, False)


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if _widens_half(input, dtype):
        return aten._softmax.default(input, dim, True)
    return aten._softmax.default(input if dtype is None else input.to(dtype), dim, False)


def _widens_half(input: Tensor, dtype: torch.dtype | None) -> bool:
    # `softmax` and `log_softmax` in SoftMax.cpp: CUDA's kernel reads fp16 (not bf16) and writes fp32, without a copy.
    # The CPU has no such kernel. Inputs without a gradient may be known, so they use the CPU's path.
    return input.dtype == torch.float16 and dtype == torch.float32 and input.requires_grad
