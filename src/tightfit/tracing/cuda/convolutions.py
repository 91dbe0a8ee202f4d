"""Copies that CUDA's convolutions and pools make of tensors in another layout, and sums for biases.

Source: `_convolution` and `convolution_backward` in ATen/native/Convolution.cpp, cudnn/ConvShared.cpp. The memory in
which cuDNN computes is chosen by cuDNN and not counted.
"""

from collections.abc import Callable, Sequence

import torch

from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.cuda.reductions import LaunchLimits, reduction_scratch
from tightfit.tracing.shapes import TensorShape, contiguous

Shapes = Sequence[TensorShape]
CONVOLUTION, BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"


def convolution_scratch(name: str, inputs: Shapes, arguments: tuple, card: LaunchLimits) -> list[int]:
    """The blocks of a convolution or of its backward, with its results among them."""
    if not all(shape.numel for shape in inputs):
        return []
    return _forward(*inputs[:2]) if name == CONVOLUTION else _backward(inputs, arguments, card)


def _forward(source: TensorShape, weight: TensorShape) -> list[int]:
    row, (source, weight) = _row(source), map(_in_two_dimensions, (_row_made(source), weight))
    is_last = _has_channels_last(source) or _has_channels_last(weight)
    return [*row, *_layout_copies(source, is_last), RESULT, *_layout_copies(weight, is_last)]


def _backward(inputs: Shapes, arguments: tuple, card: LaunchLimits) -> list[int]:
    *_, is_transposed, _, groups, wanted = arguments
    gradient, source, weight = inputs[:3]
    row, (gradient, source, weight) = _row(source), map(_in_two_dimensions, (gradient, _row_made(source), weight))
    is_last = _has_channels_last(source) or _has_channels_last(weight)
    copied, of_gradient, of_weight = (_layout_copies(shape, is_last) for shape in (source, gradient, weight))
    # `use_cudnn_depthwise`: cuDNN has kernels by channel for fp16
    is_by_channel = groups == source.shape[1] > 1 and not is_last and source.dtype != torch.float16
    # Kernels by channel have one copy of the gradient for both results, and so do transposed ones. cuDNN's others have
    # one if the gradient is in the other layout, else one for each result.
    once: list[int] = []
    if is_by_channel or is_transposed or _has_channels_last(gradient) != is_last:
        once, of_gradient = of_gradient, []
    copied = copied if wanted[1] else []
    blocks = [*row, *once, *copied] if is_by_channel else [*row, *copied, *once]
    if wanted[0]:
        blocks += [RESULT, *of_gradient, *of_weight, *_freed(of_weight), *_freed(of_gradient)]
        if is_by_channel and copied:
            blocks += _freed(copied)
            copied = []
    if wanted[1]:
        blocks += [*of_gradient, RESULT, *_freed(of_gradient)]
    blocks += [*_freed(once), *_freed(copied)]
    if wanted[2]:
        dims = [dim for dim in range(len(inputs[0].shape)) if dim != 1]
        blocks += [RESULT, *reduction_scratch("aten.sum.dim_IntList", inputs[:1], (), (dims,), card)]
    return blocks


# Pools and enlargements: AveragePool2d.cu, DilatedMaxPool2d.cu, AdaptiveAveragePooling.cu, UpSampleNearest2d.cu


def _pooled(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    """The blocks of a pool or an enlargement: its results, and a copy of the input as that lies."""
    return [*[RESULT] * len(outputs), *_copied_as_it_lies(inputs[0])]


def _pooled_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    """The blocks of a pool's backward, which has the gradient as the input lies."""
    gradient, source = inputs[:2]
    return [RESULT, *_copied_as_it_lies(source), *_layout_copies(gradient, _has_channels_last(source))]


def _averaged(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    """The blocks of an adaptive mean."""
    return [*_copied_as_it_lies(inputs[0]), RESULT]


def _averaged_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    """The blocks of an adaptive mean's backward."""
    gradient, source = inputs[:2]
    return [RESULT, *([] if _has_channels_last(source) else _layout_copies(gradient, False))]


def _enlarged_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    """The blocks of an enlargement's backward."""
    return [RESULT, *_copied_as_it_lies(inputs[0])]


def _copied_as_it_lies(shape: TensorShape) -> list[int]:
    return _layout_copies(shape, _has_channels_last(shape))


def _freed(blocks: list[int]) -> list[int]:
    return [-size for size in blocks]


def _row(source: TensorShape) -> list[int]:
    # A convolution of one dimension makes its input contiguous first, for all of the operator.
    return [source.bytes] if len(source.shape) == 3 and not source.is_contiguous else []


def _row_made(source: TensorShape) -> TensorShape:
    return contiguous(source.shape, source.dtype) if _row(source) else source


def _in_two_dimensions(shape: TensorShape) -> TensorShape:
    # `view4d`
    if len(shape.shape) != 3:
        return shape
    (batch, channels, length), (of_batch, of_channel, step) = shape.shape, shape.stride
    return TensorShape((batch, channels, 1, length), (of_batch, of_channel, length * step, step), shape.dtype)


def _has_channels_last(shape: TensorShape) -> bool:
    """True if `suggest_memory_format` takes a tensor for one whose channels lie next to each other."""
    # `is_channels_last_strides_2d_s4` in c10/core/MemoryFormat.h
    least = 0
    for dim in (1, *range(len(shape.shape) - 1, 1, -1), 0):
        if shape.stride[dim] < max(least, dim == 1) or (dim == 0 and least == shape.stride[1]):
            return False
        least = shape.stride[dim] * max(1, shape.shape[dim])
    return True


def _layout_copies(shape: TensorShape, is_last: bool) -> list[int]:
    """Bytes of the copy that a tensor needs to have its channels last, or to be contiguous."""
    order = (0, *range(2, len(shape.shape)), 1) if is_last else range(len(shape.shape))
    sizes, strides = (tuple(each[dim] for dim in order) for each in (shape.shape, shape.stride))
    turned = TensorShape(sizes, strides, shape.dtype)
    return [] if turned.is_contiguous else [shape.bytes]


FORMULAS: dict[str, Callable[[Shapes, Shapes, tuple], list[int]]] = {
    "aten.avg_pool2d.default": _pooled,
    "aten.avg_pool2d_backward.default": _pooled_backward,
    "aten.max_pool2d_with_indices.default": _pooled,
    "aten.max_pool2d_with_indices_backward.default": _pooled_backward,
    "aten._adaptive_avg_pool2d.default": _averaged,
    "aten._adaptive_avg_pool2d_backward.default": _averaged_backward,
    "aten.upsample_nearest2d.default": _pooled,
    "aten.upsample_nearest2d_backward.default": _enlarged_backward,
}
