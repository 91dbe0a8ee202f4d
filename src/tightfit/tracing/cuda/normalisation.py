"""Scratch memory of CUDA's softmax and normalisation kernels, from PyTorch's sources."""

from collections.abc import Callable, Sequence

import torch

from tightfit.runtime.internals import installed_release
from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.shapes import TensorShape

Shapes = Sequence[TensorShape]


def copies(*shapes: TensorShape) -> list[int]:
    """Bytes of the copies that `Tensor.contiguous` makes of these tensors."""
    return [shape.bytes for shape in shapes if not shape.is_contiguous]


def product(left: TensorShape, right: TensorShape) -> TensorShape:
    """`left * right` as a tensor: its strides follow the operands' (`TensorIteratorBase::reorder_dimensions`)."""
    meta = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta") for s in (left, right)]
    return TensorShape.of(meta[0] * meta[1])


# Softmax: ATen/native/cuda/SoftMax.cu


def _softmax(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    return copies(inputs[0])  # `host_softmax`


def _softmax_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `softmax_backward_cuda_out` computes `grad * output`; `host_softmax_backward` makes it and the output contiguous
    gradient, output = inputs
    weighted = product(gradient, output)
    return [weighted.bytes, *copies(weighted, output)]


def _log_softmax_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    return copies(*inputs)  # `host_softmax_backward`


# Layer norm and RMS norm: ATen/native/cuda/layer_norm_kernel.cu


def _layer_norm(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `layer_norm_cuda`, `_fused_rms_norm_cuda`: `expect_contiguous` of input, weight and bias, before the results
    return [*copies(*inputs), *[RESULT] * len(outputs)]


def _layer_norm_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `layer_norm_backward_cuda`, `_fused_rms_norm_backward_cuda`: `expect_contiguous` of the input and the weight, then
    # the gradient of the input; for what follows see `by_card.py`. The statistics are the forward's own, contiguous.
    return [*copies(*inputs[1:]), RESULT]


# Group norm: ATen/native/group_norm.cpp and cuda/group_norm_kernel.cu


def _group_norm(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `GroupNormKernelImplInternal`: from 2.13 on the statistics of 16-bit inputs in fp32 (seen on null cards of 2.12,
    # 2.13 and on an H200 with 2.11); with weights or biases also a scale and a shift of every channel
    batch, channels, pixels, groups = arguments[-5:-1]
    source = inputs[0]
    accumulated = _accumulated(source)
    in_fp32 = source.dtype.itemsize == 2 and installed_release() >= (2, 13)
    statistics = [accumulated * batch * groups] * 2 if in_fp32 else []
    per_channel = [accumulated * batch * channels] * 2 if pixels > 1 and len(inputs) > 1 else []
    return [*copies(*inputs), *statistics, *per_channel]


def _group_norm_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `GroupNormBackwardKernelImplInternal`: the sums ds and db of every channel. If the input has a gradient, c2 and c3
    # of every group; with a weight, and several pixels, also c1 of every channel.
    batch, channels, pixels, groups, (into_source, *_) = arguments[-5:]
    width = _accumulated(inputs[0])
    channel, group = width * batch * channels, width * batch * groups
    sums = [channel] * 2
    fused = [group] * 2 if into_source else []
    scales = [channel] if into_source and pixels > 1 and len(inputs) > 4 else []
    return [*copies(*inputs), *sums, *fused, *scales]


def _accumulated(shape: TensorShape) -> int:
    """Bytes of a number of the dtype in which sums are computed: fp32 for 16-bit inputs."""
    return max(4, shape.dtype.itemsize)


FORMULAS: dict[str, Callable[[Shapes, Shapes, tuple], list[int]]] = {
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten.native_layer_norm.default": _layer_norm,
    "aten._fused_rms_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
}
