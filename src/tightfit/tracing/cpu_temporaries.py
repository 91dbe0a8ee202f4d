"""Temporaries inside CPU operators, which the allocator sees and the dispatcher does not, by formula.

These are converted operands of mixed dtypes, sums of norms, and intermediate results of composite operators. What
follows no formula is measured (`cpu_measured.py`).
"""

from collections.abc import Sequence

import torch

from tightfit.tracing.shapes import TensorShape

# Elementwise operators convert an operand of another dtype as a whole before they compute (on the CPU only). Source:
# `TensorIteratorBase::compute_types`, ATen/TensorIterator.cpp.
_ARITHMETIC = ("add", "sub", "mul", "div", "maximum", "minimum", "fmod", "remainder", "atan2", "addcmul", "addcdiv")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
PROMOTING = frozenset(
    [f"aten.{name}{ending}" for name in (*_ARITHMETIC, *_COMPARISONS) for ending in (".Tensor", ".default", "_.Tensor")]
    + ["aten.pow.Tensor_Tensor", "aten.where.self"]
)


def converted_operands(name: str, inputs: Sequence[TensorShape]) -> int:
    """Bytes of the operands of an elementwise operator that are converted to the dtype in which it computes."""
    operands = inputs[1:] if name == "aten.where.self" else inputs
    if len({shape.dtype for shape in operands}) < 2:
        return 0
    common = common_dtype(operands)
    converted = [shape for shape in operands if shape.dtype != common and shape.shape]
    if name.endswith("_.Tensor"):
        converted += [shape for shape in operands[:1] if shape.dtype != common]  # the result, before it is written back
    return sum(shape.numel * common.itemsize for shape in converted)


def common_dtype(operands: Sequence[TensorShape]) -> torch.dtype:
    """The dtype that PyTorch promotes the operands to."""
    tensors = [torch.empty((1,) * len(shape.shape), dtype=shape.dtype, device="meta") for shape in operands]
    common = torch.result_type(tensors[0], tensors[-1])
    for tensor in tensors[1:-1]:
        common = torch.promote_types(common, tensor.dtype)
    return common


# Sums are computed in the dtype of the result. An input of another dtype is converted as a whole. Source:
# `make_reduction_from_ty` in ATen/native/ReduceOpsUtils.h, `impl_func_cum_ops` in ATen/native/ReduceOps.cpp.
_SUMS = "sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int cumsum.default cumprod.default"
SUMS = frozenset(f"aten.{name}" for name in _SUMS.split())


def converted_sum(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape]) -> int:
    """Bytes that a sum allocates besides its result on the CPU."""
    source, result = inputs[0], outputs[0]
    if source.dtype != result.dtype:
        return source.numel * result.dtype.itemsize
    if name.startswith("aten.mean.") and source.dtype.itemsize == 2:  # `mean_out`, same file: in fp32, then back
        return 4 * (source.numel + result.numel)
    return 0


# Scattering and gathering in 16 bits uses an fp32 buffer as large as the written tensor. Source: `create_acc_buffer` in
# ATen/native/cpu/ScatterGatherKernel.cpp, which `index_add_` calls as well, but for rows along the first dimension.
_SCATTERS = "scatter.src scatter_.src scatter.reduce scatter_.reduce scatter_add.default scatter_add_.default"
_SCATTERS += " scatter.value scatter_.value index_add.default index_add_.default gather.default"
BUFFERED_IN_16_BITS = frozenset(f"aten.{name}" for name in _SCATTERS.split())


def buffer_in_fp32(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple) -> int:
    """Bytes of the fp32 buffer with which a 16-bit tensor is scattered or gathered."""
    written = outputs[0] if name.startswith("aten.gather") else inputs[0]
    dimension = next((argument for argument in arguments if type(argument) is int), 0)
    by_rows = dimension == 0 and name.startswith("aten.index_add")
    return 0 if written.dtype not in (torch.bfloat16, torch.float16) or by_rows else 4 * written.numel


# Operators that call others below the dispatcher, on every device alike.
COMPOSITES = frozenset({"aten.logsumexp.default", "aten._safe_softmax.default"})


def composite_scratch(
    name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple
) -> list[int]:
    """Bytes of each temporary of an operator of `COMPOSITES`."""
    source, result = inputs[0], outputs[0]
    if name == "aten.logsumexp.default":
        # `logsumexp_out_impl` in ATen/native/ReduceOps.cpp: the exponentials of all numbers, and the maxima
        return [source.numel * result.dtype.itemsize, result.bytes]
    # `_safe_softmax` in ATen/native/transformers/attention.cpp: a mask of the numbers that are minus infinity, a mask
    # of the rows in which all are, and the zero that replaces them
    row = source.shape[arguments[0] if arguments else -1]
    return [source.numel, source.numel // row, result.dtype.itemsize]


# A reduced elementwise loss is computed unreduced first. Source: `TORCH_IMPL_FUNC(mse_loss_out)`, ATen/native/Loss.cpp.
REDUCED_LOSSES = frozenset({"aten.mse_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default"})


def unreduced_loss(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape]) -> int:
    """Bytes of a reduced loss before its reduction."""
    if outputs[0].shape:
        return 0
    count, width = torch.broadcast_shapes(inputs[0].shape, inputs[1].shape).numel(), outputs[0].dtype.itemsize
    # `apply_loss_reduction`, same file, takes a mean, whose sum is in fp32; the others sum into their result
    in_fp32 = 4 * (count + 1) if name == "aten.huber_loss.default" and width == 2 else 0
    return count * width + in_fp32


# Sums of each channel of contiguous images: their mean and deviation (`batch_norm_cpu_update_stats_template` in
# ATen/native/Normalization.cpp), and for each of them in a batch two sums (`GroupNormBackwardKernelImplInternal` in
# ATen/native/cpu/group_norm_kernel.cpp).
BATCH_NORMS = frozenset(
    {"aten.native_batch_norm.default", "aten._native_batch_norm_legit.default", "aten._batch_norm_with_update.default"}
)
GROUP_NORM_BACKWARD = "aten.native_group_norm_backward.default"


def channel_sums(name: str, inputs: Sequence[TensorShape]) -> int:
    """Bytes of the sums of each channel that a norm over images has beside its results."""
    image = inputs[0].shape
    count = image[1] if name in BATCH_NORMS else image[0] * image[1]
    return 2 * 4 * count


# Gradients of a layer norm's weight and bias are summed by each thread. Source:
# `LayerNormBackwardKernelImplInternal` in ATen/native/cpu/layer_norm_kernel.cpp.
LAYER_NORM_BACKWARD = "aten.native_layer_norm_backward.default"


def layer_norm_sums(inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], threads: int) -> int:
    """Bytes of the sums of each thread, where a gradient of the weight or the bias is wanted."""
    normalised = outputs[-1].numel
    return 2 * threads * normalised * inputs[1].dtype.itemsize if len(outputs) > 1 else 0
