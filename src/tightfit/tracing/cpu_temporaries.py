"""Temporaries inside CPU operators, which the allocator sees and the dispatcher does not.

These are converted operands of mixed dtypes, intermediate results of composite operators, copies of operands in another
order, and oneDNN's reordered operands of convolutions. `tests/tracing/test_scratch_of_operators.py` compares them with
the allocator for PyTorch's own samples of all operators.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tightfit.memory.allocator import cpu_rise, storage_bytes
from tightfit.runtime.internals import no_modes
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
# ATen/native/cpu/ScatterGatherKernel.cpp, which `index_add_` calls as well. Rows scattered along the first dimension
# use one row for each thread instead; these few KiB are left out.
_SCATTERS = "scatter.src scatter_.src scatter.reduce scatter_.reduce scatter_add.default scatter_add_.default"
_SCATTERS += " scatter.value scatter_.value index_add.default index_add_.default gather.default"
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


# Operators whose temporaries follow from no formula worth writing: they run once for each shape, on zeros. Those of
# `MEASURED` have temporaries with any operands, those of `COPYING` copy operands that are not contiguous.
_CONVOLUTIONS = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
_MEASURED = """
_fft_c2c _fft_c2r _fft_r2c _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _linalg_det _sample_dirichlet
_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
_fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward
_fake_quantize_per_tensor_affine_cachemask_tensor_qparams
_linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _unsafe_masked_index
_unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits clamp.Tensor dist exp2 histc
index_reduce isin.Tensor_Tensor isinf kthvalue ldexp.Tensor linalg_eig linalg_inv_ex linalg_lstsq linalg_lu
linalg_matrix_exp linalg_pinv.atol_rtol_tensor linalg_qr linalg_vector_norm multinomial mvlgamma
native_batch_norm_backward native_dropout_backward renorm normal.Tensor_float roll rrelu_with_noise
soft_margin_loss soft_margin_loss_backward sort sort.stable upsample_bicubic2d upsample_bilinear2d
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_trilinear3d im2col _embedding_bag
_embedding_bag_backward scatter_reduce.two scatter_reduce_.two
_embedding_bag_per_sample_weights_backward batch_norm_backward masked_scatter_backward
"""
_COPYING = """
_batch_norm_with_update _native_batch_norm_legit native_batch_norm native_group_norm_backward
_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _log_softmax_backward_data
_softmax_backward_data _upsample_bilinear2d_aa_backward
_upsample_nearest_exact1d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool2d_backward
avg_pool3d_backward channel_shuffle embedding_dense_backward fractional_max_pool2d_backward
fractional_max_pool3d_backward gelu_backward grid_sampler_2d_backward index_select linalg_ldl_solve
linalg_solve_triangular lu_unpack masked_scatter max_pool2d_with_indices_backward
max_pool3d_with_indices_backward mv native_layer_norm_backward pixel_shuffle pixel_unshuffle
reflection_pad1d_backward replication_pad1d_backward replication_pad2d_backward scatter.value scatter_add tril triu
unfold_backward upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
upsample_nearest1d_backward upsample_nearest2d_backward upsample_trilinear3d_backward
"""


def _overloads(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split())


MEASURED, COPYING = _CONVOLUTIONS | _overloads(_MEASURED), _overloads(_COPYING)
# The exponential of one matrix takes 5 to 13 matrices, more of them the larger its norm is. Several matrices take those
# of the largest degree whatever their numbers are (`mexp` in ATen/native/LinearAlgebra.cpp).
BY_NORM = _overloads("linalg_matrix_exp")
_LARGE = 9.0  # more than the norm from which on it takes the most, in every dtype
PIVOTED = _overloads("linalg_ldl_solve lu_unpack")  # LAPACK counts rows from 1: a row 0 lies before the matrix
LARGEST_RUN = 16 * 2**20  # bytes of operands and results; larger calls are extrapolated from two small batches
LARGEST_WHOLE_RUN = 256 * 2**20  # the same of calls that cannot be made smaller


def is_measured(name: str, inputs: Sequence[torch.Tensor], constants: tuple) -> bool:
    """True if the temporaries of a call are known only once it ran."""
    if name in MEASURED:
        return True
    if name in BUFFERED_IN_16_BITS:
        return inputs[1].dtype == torch.int32  # which is converted
    if name in SUMS and inputs[0].dtype.itemsize == 2:  # over dimensions that are not one, they are made fp32
        dimensions = next((each for each in constants if isinstance(each, list | tuple)), ())
        return len(dimensions) > 1 or not inputs[0].is_contiguous()
    return name in COPYING and not all(tensor.is_contiguous() for tensor in inputs)


def measured_scratch(operator: Any, args: tuple, kwargs: dict[str, Any], outputs: Sequence[TensorShape]) -> int | None:
    """Bytes of scratch memory of a call, which runs on zeros of the same shapes, or of two smaller batches.

    None if it cannot run on zeros, or is too large to run.
    """
    args, kwargs = tree_map_only(torch.Tensor, TensorShape.of, (args, kwargs))
    shapes = [each for each in _leaves((args, kwargs)) if isinstance(each, TensorShape)]
    taken = sum(shape.bytes for shape in (*shapes, *outputs))
    batch = shapes[0].shape[0] if shapes and shapes[0].shape else 1
    if taken > LARGEST_RUN and batch > 2:
        # Memory for activations grows with the batch; memory for weights does not. Two batches tell them apart.
        named = str(operator) in _CONVOLUTIONS
        smaller = [_with_batch((args, kwargs), batch, size, 2 if named else len(shapes)) for size in (1, 2)]
        one, two = (_run(operator, *call) for call in smaller)
        if one is not None and two is not None:
            return one + (batch - 1) * (two - one)
    return _run(operator, args, kwargs) if taken <= LARGEST_WHOLE_RUN else None


def _is_leaf(each: Any) -> bool:
    """True for a shape, and for sizes given as a list of numbers."""
    return isinstance(each, TensorShape) or (isinstance(each, list) and all(type(n) is int for n in each))


def _leaves(call: Any) -> list[Any]:
    return tree_leaves(call, is_leaf=_is_leaf)


def _with_batch(call: Any, batch: int, size: int, tensors: int) -> Any:
    """The call with another first dimension of its first tensors, and of sizes that are given as numbers."""
    left = itertools.count()

    def resized(each: Any) -> Any:
        if isinstance(each, TensorShape):
            is_batched = next(left) < tensors and each.shape[:1] == (batch,)
            return each._replace(shape=(size, *each.shape[1:])) if is_batched else each
        is_sizes = isinstance(each, list) and len(each) > 2 and each[0] == batch
        return [size, *each[1:]] if is_sizes else each

    return tree_map(resized, call, is_leaf=_is_leaf)


def _run(operator: Any, args: tuple, kwargs: dict[str, Any]) -> int | None:
    """The bytes that a call on zeros allocates beside its results, or on ones where zeros are refused, as probabilities
    are, or would be written elsewhere (PyTorch 2.11 passes pivots on unchecked); None if it can run on neither. Where
    they depend on a norm, on large numbers.
    """
    if str(operator) in BY_NORM:
        return _run_on(partial(torch.full, fill_value=_LARGE), operator, args, kwargs)
    found = None if str(operator) in PIVOTED else _run_on(torch.zeros, operator, args, kwargs)
    return _run_on(torch.ones, operator, args, kwargs) if found is None else found


def _run_on(filled: Callable[..., torch.Tensor], operator: Any, args: tuple, kwargs: dict[str, Any]) -> int | None:
    args, kwargs = tree_map(partial(_real, filled), (args, kwargs), is_leaf=_is_leaf)
    given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    results: list[Any] = []
    with no_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            operator(*args, **kwargs)
            rise = cpu_rise(lambda: results.append(operator(*args, **kwargs)))
        except (RuntimeError, IndexError):
            return None
    made = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
    if any(t.layout is not torch.strided for t in made):  # sparse gradients have no storage of their own
        return None
    return max(0, rise - storage_bytes([t for t in made if t.untyped_storage().data_ptr() not in given]))


def _real(filled: Callable[..., torch.Tensor], each: Any) -> Any:
    if isinstance(each, torch.Generator):  # the user's, which a dry run does not draw from
        return torch.Generator(each.device)
    if not isinstance(each, TensorShape):
        return each
    places = 1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride, strict=True))
    filled = torch.ones if each.dtype == torch.bool else filled  # a mask that is true everywhere, the worst case
    return filled((places if each.numel else 0,), dtype=each.dtype).as_strided(each.shape, each.stride)
