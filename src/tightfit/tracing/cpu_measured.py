"""Temporaries of CPU operators that follow from no formula worth writing: the operator runs once for each shape.

`tests/tracing/test_scratch_of_operators.py` compares them with the allocator for PyTorch's own samples of all
operators.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tightfit.memory.allocator import cpu_rise, storage_bytes
from tightfit.runtime.internals import no_modes
from tightfit.runtime.operators import traits_of
from tightfit.tracing.cpu_temporaries import BUFFERED_IN_16_BITS, SUMS
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.workspace import has_formula


def _overloads(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split())


# Of PyTorch's operators without a formula those of `_FREE` and the pointwise ones have no temporaries, whatever their
# operands are, and those of `_COPYING` none unless an operand is not contiguous. All others run once for each shape, on
# zeros: so does an operator that nobody looked at. Both lists are what PyTorch's own samples showed in four layouts.
_NAMES = """
_adaptive_avg_pool3d _assert_async _grouped_mm _histogramdd_bin_edges _linalg_check_errors _local_scalar_dense
_pdist_backward _pdist_forward _prelu_kernel _prelu_kernel_backward _to_copy adaptive_max_pool3d addmm addr alias_copy
all amax amin any as_strided_copy as_strided_scatter bernoulli block_diag bucketize cat cauchy cholesky
cholesky_inverse clone col2im complex constant_pad_nd copy cummax cummin detach diag_embed diagonal_backward
diagonal_copy diagonal_scatter dot elu_backward empty_like equal expand_copy exponential fill flip floor_divide
full_like geometric glu glu_backward grid_sampler_2d grid_sampler_3d grid_sampler_3d_backward hardshrink_backward
hardsigmoid_backward hardswish hardswish_backward hardtanh_backward hash_tensor histogram huber_loss_backward
index_copy index_fill leaky_relu_backward lift_fresh linalg_cholesky_ex linalg_cross linalg_lu_factor_ex linspace
log_normal log_sigmoid_backward logcumsumexp logspace masked_fill mish_backward mode mse_loss_backward nansum
new_empty new_empty_strided new_full new_ones new_zeros nll_loss_backward nll_loss_forward nonzero nonzero_static norm
ones_like permute_copy polar put rand_like randint_like randn_like resize resize_as rot90 rrelu_with_noise_backward
rsub searchsorted segment_reduce select_backward select_scatter set slice_backward slice_scatter
smooth_l1_loss_backward softplus_backward softshrink_backward split_with_sizes_copy squeeze_copy stack std std_mean
t_copy take topk trace transpose_copy triangular_solve unbind_copy unfold_copy uniform unique_consecutive
unsqueeze_copy var var_mean vdot view_copy zero zeros_like
"""
_FREE = frozenset(_NAMES.split())
_OF_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")  # of an optimizer: one at a time
_COPYING = _overloads("""
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _batch_norm_with_update
_cdist_backward _cdist_forward _ctc_loss _ctc_loss.Tensor _log_softmax _log_softmax_backward_data
_native_batch_norm_legit _safe_softmax _softmax _softmax_backward_data _upsample_bilinear2d_aa_backward
_upsample_nearest_exact1d_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d_backward addmv
aminmax argmax argmin avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward channel_shuffle embedding
embedding_dense_backward fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d
fractional_max_pool3d_backward gelu_backward grid_sampler_2d_backward index.Tensor index_put index_put_ index_select
linalg_ldl_solve linalg_solve_triangular log_sigmoid_forward lu_unpack masked_scatter max max_pool2d_with_indices
max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward max.dim min min.dim mv
narrow_copy native_batch_norm native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad1d_backward reflection_pad2d
replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward scatter.value scatter_add
tril tril_ triu triu_ unfold_backward upsample_bicubic2d_backward upsample_bilinear2d_backward
upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_trilinear3d_backward
""")
# Pointwise operators that call others, whose results lie between.
_POINTWISE_MEASURED = _overloads("clamp.Tensor exp2 isinf ldexp.Tensor mvlgamma native_dropout_backward")
_CONVOLUTIONS = _overloads("convolution convolution_backward")
# The exponential of one matrix takes 5 to 13 matrices, more of them the larger its norm is. Several matrices take those
# of the largest degree whatever their numbers are (`mexp` in ATen/native/LinearAlgebra.cpp).
BY_NORM = _overloads("linalg_matrix_exp")
_LARGE = 9.0  # more than the norm from which on it takes the most, in every dtype
_PIVOTED = _overloads("linalg_ldl_solve lu_unpack")  # LAPACK counts rows from 1: a row 0 lies before the matrix
LARGEST_RUN = 16 * 2**20  # bytes of operands and results; larger calls are extrapolated from two small batches
LARGEST_WHOLE_RUN = 256 * 2**20  # the same of calls that cannot be made smaller


def is_measured(operator: Any, inputs: Sequence[torch.Tensor], constants: tuple) -> bool:
    """True if the temporaries of a call are known only once it ran."""
    name = traits_of(operator).name
    if name in BUFFERED_IN_16_BITS:
        # In 32 bits the index is converted. One for each row, expanded over its numbers, may take another way.
        return inputs[1].dtype == torch.int32 or not inputs[1].is_contiguous()
    if name in SUMS:  # over dimensions that are not one, numbers in 16 bits are made fp32
        dimensions = next((each for each in constants if isinstance(each, list | tuple)), ())
        return inputs[0].dtype.itemsize == 2 and (len(dimensions) > 1 or not inputs[0].is_contiguous())
    if not inputs or any(tensor.layout is not torch.strided for tensor in inputs):
        return False
    if name in _COPYING:
        return not all(tensor.is_contiguous() for tensor in inputs)
    if not name.startswith("aten.") or has_formula(name):
        return False
    base = name.split(".")[1]
    if name in _POINTWISE_MEASURED:
        return True
    if torch.Tag.pointwise in operator.tags:
        return any(tensor.is_complex() for tensor in inputs)  # absolute values are complex first
    return base.removesuffix("_") not in _FREE and not base.startswith(_OF_LISTS)


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
    found = None if str(operator) in _PIVOTED else _run_on(torch.zeros, operator, args, kwargs)
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
