"""Casts CPU tensors as `torch.autocast("cuda")` casts CUDA tensors: CUDA's lists instead of the CPU's.

The lists are those of ATen/autocast_mode.h (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`,
`AT_FORALL_FP32_SET_OPT_DTYPE`, `AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE`, `AT_FORALL_PROMOTE`) and autocast_mode.cpp.
They contain every name of torch 2.11, 2.12, 2.13 and 2.15, except those of named tensors, which 2.13 dropped and which
kernels written in Python do not support. The installed release decides which of them are cast: it registers kernels for
AutocastCUDA even in a build without CUDA. So 2.11 does not cast rms_norm, and 2.13 has no linalg_matrix_sqrth.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.runtime.internals import NoAutocast, fallthrough, has_kernel, operators_with_kernel
from tightfit.runtime.operators import instances, map_instances

_LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
"""
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
"""
_FP32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
_FP32_APPENDED = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_REFUSED = ("binary_cross_entropy",)  # CUDA raises here: the step would not run at all

CUDA_LISTS: dict[str, frozenset[str]] = {
    "lower precision": frozenset(_LOWER_PRECISION.split()),
    "fp32": frozenset(_FP32.split()),
    "fp32 result": frozenset(_FP32_RESULT.split()),
    "widest": frozenset(_WIDEST.split()),
    "fp32 appended": frozenset(_FP32_APPENDED),
    "refused": frozenset(_REFUSED),
}


class AutocastKernels:
    """Mutable: the cache of weights cast within the outermost autocast region.

    Source of the cache's rule: `cached_cast` in ATen/autocast_mode.cpp.
    """

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self.cache.clear()

    def kernels(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Operator names with their libraries, and the kernels that replace the CPU's autocast kernels."""
        makers: dict[str, Callable[[Any], Callable[..., Any]]] = {
            "lower precision": self._lower_precision,
            "fp32": self._fp32,
            "fp32 result": self._fp32_result,
            "widest": self._widest,
            "fp32 appended": self._fp32_appended,
        }
        replaced = set()
        for kind, make in makers.items():
            for name in CUDA_LISTS[kind]:
                if has_kernel(f"aten::{name}", "AutocastCUDA"):
                    replaced.add(f"aten::{name}")
                    yield f"aten::{name}", make(_overload(name))
        # The CPU's autocast casts operators that CUDA's does not. Those must do nothing. Of the operators of other
        # libraries (torchvision's `nms`), those with a kernel for either are cast alike by both.
        for qualified in operators_with_kernel("AutocastCPU"):
            if qualified not in replaced and (
                qualified.startswith("aten::") or not has_kernel(qualified, "AutocastCUDA")
            ):
                yield qualified, fallthrough

    # The casting policies: `CastPolicy` in ATen/autocast_mode.h

    def _lower_precision(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return self._call(operator, torch.get_autocast_dtype("cpu"), args, kwargs)

        return kernel

    def _fp32(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return self._call(operator, torch.float32, args, kwargs)

        return kernel

    def _fp32_result(self, operator: Any) -> Callable[..., Any]:
        arguments = [argument.name for argument in operator._schema.arguments]
        place = arguments.index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if place < len(args) else kwargs.get("dtype")
            if given is None and _eligible(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            with NoAutocast():
                return operator(*args, **kwargs)

        return kernel

    def _widest(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            lower = torch.get_autocast_dtype("cpu")
            wide = any(t.dtype == torch.float32 for t in instances(torch.Tensor, args) if _eligible(t))
            return self._call(operator, torch.float32 if wide else lower, args, kwargs)

        return kernel

    def _fp32_appended(self, operator: Any) -> Callable[..., Any]:
        name = operator._schema.name.removeprefix("aten::")
        with_dtype = getattr(getattr(torch.ops.aten, name), _FP32_APPENDED[f"{name}.{operator._overloadname}"])

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with NoAutocast():
                if not _eligible(args[0]):
                    return operator(*args, **kwargs)
                return with_dtype(*args, **kwargs, dtype=torch.float32)

        return kernel

    def _call(self, operator: Any, dtype: torch.dtype, args: tuple, kwargs: dict) -> Any:
        """Call an operator with its arguments cast, from the last argument of its schema to the first.

        C++ evaluates the arguments of a call in an order that the compiler chooses (`cached_cast(...)...` in
        `WrapFunction_`, ATen/autocast_mode.h). The compiler of PyTorch's wheels for Linux begins with the last one.
        Tensors of a list are cast by a loop, from the first to the last.
        """

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return self._cached(tensor, dtype)

        places = {argument.name: place for place, argument in enumerate(operator._schema.arguments)}
        with NoAutocast():
            named = dict(kwargs)
            for key in sorted(kwargs, key=places.__getitem__, reverse=True):
                (named[key],) = map_instances(torch.Tensor, cast, (kwargs[key],))
            given = [map_instances(torch.Tensor, cast, (value,))[0] for value in reversed(args)]
            return operator(*reversed(given), **named)

    def _cached(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _eligible(tensor) or tensor.dtype == dtype:
            return tensor
        # Only casts of fp32 leaves that require a gradient are cached, as in `cached_cast`.
        is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not is_weight or not torch.is_autocast_cache_enabled() or dtype == torch.float32:
            return tensor.to(dtype)
        known = self.cache.get(id(tensor))
        if known is None or known[1].dtype != dtype:
            # With the weight itself, which keeps its id from being reused.
            known = self.cache[id(tensor)] = (tensor, tensor.to(dtype))
        return known[1]


def _eligible(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.is_floating_point() and argument.dtype != torch.float64


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")
