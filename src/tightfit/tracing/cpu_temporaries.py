"""Temporaries inside CPU operators, which the allocator sees and the dispatcher does not.

These are converted operands of mixed dtypes, intermediate results of composite operators, and oneDNN's reordered
operands of convolutions.
"""

from collections.abc import Sequence

import torch

from tightfit.memory.allocator import cpu_rise, storage_bytes
from tightfit.tracing.shapes import TensorShape

aten = torch.ops.aten

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
# ATen/native/cpu/ScatterGatherKernel.cpp, which `index_add_` calls as well. Rows scattered along the first dimension
# use one row for each thread instead; these few KiB are left out.
_SCATTERS = "scatter.src scatter_.src scatter.reduce scatter_.reduce scatter_add.default scatter_add_.default"
_SCATTERS += " scatter_reduce.two scatter_reduce_.two index_add.default index_add_.default gather.default"
BUFFERED_IN_16_BITS = frozenset(f"aten.{name}" for name in _SCATTERS.split())


def buffer_in_fp32(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple) -> int:
    """Bytes of the fp32 buffer with which a 16-bit tensor is scattered or gathered."""
    written = outputs[0] if name.startswith("aten.gather") else inputs[0]
    dimension = next((argument for argument in arguments if type(argument) is int), 0)
    index = inputs[1]
    by_rows = dimension == 0 and (name.startswith("aten.index_add") or 0 in index.stride)
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


def unreduced_loss(inputs: Sequence[TensorShape], outputs: Sequence[TensorShape]) -> int:
    """Bytes of a reduced loss before its reduction."""
    if outputs[0].shape:
        return 0
    return torch.broadcast_shapes(inputs[0].shape, inputs[1].shape).numel() * outputs[0].dtype.itemsize


CONVOLUTIONS = {
    "aten.convolution.default": aten.convolution.default,
    "aten.convolution_backward.default": aten.convolution_backward.default,
}
LARGEST_CONVOLUTION = 16 * 2**20  # bytes of operands; larger convolutions are extrapolated from two small batches


def convolution_scratch(name: str, inputs: Sequence[TensorShape], arguments: tuple) -> int:
    """Bytes of scratch memory of a convolution. oneDNN chooses them by shape and instruction set, so it runs once."""
    if sum(shape.bytes for shape in inputs) <= LARGEST_CONVOLUTION or inputs[0].shape[0] <= 2:
        return _measured(name, tuple(inputs), repr(arguments), arguments)
    # Memory for activations grows with the batch; memory for weights does not. Two batches tell them apart.
    one, two = (_measured(name, _with_batch(name, inputs, size), repr(arguments), arguments) for size in (1, 2))
    return one + (inputs[0].shape[0] - 1) * (two - one)


def _with_batch(name: str, inputs: Sequence[TensorShape], size: int) -> tuple[TensorShape, ...]:
    batched = 2 if name == "aten.convolution_backward.default" else 1  # the gradient and the input; the input
    return tuple(
        shape._replace(shape=(size, *shape.shape[1:])) if i < batched else shape for i, shape in enumerate(inputs)
    )


_scratch: dict[tuple[str, tuple[TensorShape, ...], str], int] = {}


def _measured(name: str, inputs: tuple[TensorShape, ...], key: str, arguments: tuple) -> int:
    known = _scratch.get((name, inputs, key))
    if known is None:
        known = _scratch[name, inputs, key] = _run(name, inputs, arguments)
    return known


def _run(name: str, inputs: tuple[TensorShape, ...], arguments: tuple) -> int:
    operands = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype).zero_() for s in inputs]
    call = CONVOLUTIONS[name]
    filled = [*operands, *arguments]  # a missing bias is None among the arguments
    with torch.no_grad():
        results = [call(*filled)]
        rise = cpu_rise(lambda: results.append(call(*filled)))
    made = results[1] if isinstance(results[1], tuple) else (results[1],)
    return max(0, rise - storage_bytes([t for t in made if isinstance(t, torch.Tensor)]))
