"""Groups ATen operators into families. One measured law predicts the time of all operators of a family."""

import enum


class Family(enum.StrEnum):
    """Families of operators, by what limits their time."""

    FREE = "free"  # views and uninitialised memory: no kernel
    PRODUCT = "product"  # matrix products and convolutions
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"
    FILL = "fill"  # writes a constant
    COPY = "copy"  # copies, casts, concatenation
    TRANSPOSE = "transpose"  # copies whose source is not contiguous along its last dimension
    ARITHMETIC = "arithmetic"  # element by element, a few cheap instructions
    TRANSCENDENTAL = "transcendental"  # element by element, one exponential or similar
    ERROR_FUNCTION = "error_function"  # element by element, an error function or a general power
    REDUCTION = "reduction"
    SCAN = "scan"  # running sums
    SOFTMAX = "softmax"
    SOFTMAX_BACKWARD = "softmax_backward"
    NORM = "norm"  # fused layer and RMS norms
    NORM_BACKWARD = "norm_backward"
    GATHER = "gather"  # reads rows by index
    SCATTER = "scatter"  # adds rows by index
    RANDOM = "random"
    SORT = "sort"
    WIDENING = "widening"  # casts to a wider dtype, on cards
    UNEVEN = "uneven"  # element by element over tensors that lie unlike in memory, on cards


class WorkUnit(enum.StrEnum):
    """The unit of work of a family."""

    BYTES = "bytes"  # read and written
    ELEMENTS = "elements"  # of the largest tensor


# A family is limited by memory if its unit is bytes, and by instructions if it is elements.
STREAM_UNITS = {
    Family.FILL: WorkUnit.BYTES,
    Family.COPY: WorkUnit.BYTES,
    Family.TRANSPOSE: WorkUnit.BYTES,
    Family.ARITHMETIC: WorkUnit.BYTES,
    Family.REDUCTION: WorkUnit.BYTES,
    Family.GATHER: WorkUnit.BYTES,
    Family.TRANSCENDENTAL: WorkUnit.ELEMENTS,
    Family.ERROR_FUNCTION: WorkUnit.ELEMENTS,
    Family.SCAN: WorkUnit.ELEMENTS,
    Family.SOFTMAX: WorkUnit.ELEMENTS,
    Family.SOFTMAX_BACKWARD: WorkUnit.ELEMENTS,
    Family.NORM: WorkUnit.ELEMENTS,
    Family.NORM_BACKWARD: WorkUnit.ELEMENTS,
    Family.SCATTER: WorkUnit.ELEMENTS,
    Family.RANDOM: WorkUnit.ELEMENTS,
    Family.SORT: WorkUnit.ELEMENTS,
}

# On cards these kernels are others than those of their families, and slower: they are timed apart.
CARD_UNITS = {Family.WIDENING: WorkUnit.BYTES, Family.UNEVEN: WorkUnit.ELEMENTS}
UNITS = STREAM_UNITS | CARD_UNITS

# Names without namespace, overload, the underscore of in-place operators and the prefix of foreach operators.
_MEMBERS = {
    Family.FREE: """
        view _unsafe_view reshape _reshape_alias as_strided t transpose permute expand squeeze unsqueeze slice
        select narrow split split_with_sizes unbind chunk unfold diagonal detach alias lift lift_fresh
        view_as_real view_as_complex real imag conj _conj _neg_view empty empty_like empty_strided
        empty_permuted new_empty new_empty_strided resize set unsafe_split unsafe_split_with_sizes unsafe_chunk
        _local_scalar_dense item is_same_size _assert_async _assert_scalar""",
    Family.PRODUCT: """
        mm addmm bmm baddbmm addbmm _addmm_activation _grouped_mm _scaled_mm _scaled_grouped_mm _int_mm linear
        mkldnn_linear convolution _convolution convolution_overrideable convolution_backward
        convolution_backward_overrideable mkldnn_convolution cudnn_convolution _cudnn_rnn _cudnn_rnn_backward""",
    Family.ATTENTION: """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable _flash_attention_forward""",
    Family.ATTENTION_BACKWARD: """
        _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward _flash_attention_backward""",
    Family.FILL: """
        zero fill zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor
        arange linspace eye slice_backward select_backward _efficientzerotensor tril_indices triu_indices
        nll_loss_backward nll_loss2d_backward max_pool2d_with_indices_backward""",
    Family.COPY: """
        copy clone contiguous _to_copy cat stack constant_pad_nd repeat roll flip repeat_interleave
        split_with_sizes_copy unfold_backward pixel_shuffle _pin_memory""",
    Family.ARITHMETIC: """
        add sub rsub mul div neg abs sign square relu clamp clamp_min clamp_max maximum minimum threshold
        threshold_backward leaky_relu leaky_relu_backward where masked_fill eq ne lt le gt ge logical_and
        logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite
        floor ceil round trunc remainder fmod floor_divide addcmul addcdiv lerp tril triu hardtanh hardswish
        native_dropout_backward _masked_scale _fused_sgd _fused_adam _fused_adamw _fused_adagrad
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale nan_to_num heaviside copysign
        bitwise_left_shift bitwise_right_shift mse_loss_backward""",
    Family.TRANSCENDENTAL: """
        silu silu_backward sigmoid sigmoid_backward tanh tanh_backward exp expm1 log log1p log2 rsqrt softplus
        softplus_backward elu elu_backward mish mish_backward glu glu_backward logit logaddexp sin cos exp2 sqrt
        reciprocal log_sigmoid_forward log_sigmoid_backward hardsigmoid binary_cross_entropy_with_logits xlogy""",
    Family.ERROR_FUNCTION: """
        gelu gelu_backward erf erfc erfinv pow atan atan2 asin acos tan sinh cosh lgamma digamma""",
    Family.REDUCTION: """
        sum mean amax amin max min argmax argmin any all prod var var_mean std std_mean norm linalg_vector_norm
        nansum logsumexp aminmax dot vdot mv addmv nll_loss_forward nll_loss2d_forward mse_loss equal
        count_nonzero trace""",
    Family.SCAN: """
        cumsum cumprod cummax cummin logcumsumexp nonzero masked_select histc bincount bucketize searchsorted""",
    Family.SOFTMAX: """
        _softmax _log_softmax _safe_softmax _masked_softmax softmax log_softmax""",
    Family.SOFTMAX_BACKWARD: """
        _softmax_backward_data _log_softmax_backward_data _masked_softmax_backward""",
    Family.NORM: """
        native_layer_norm _fused_rms_norm native_group_norm native_batch_norm cudnn_batch_norm
        _native_batch_norm_legit _batch_norm_with_update""",
    Family.NORM_BACKWARD: """
        native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward
        native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward""",
    Family.GATHER: """
        embedding index index_select gather take _unsafe_index take_along_dim""",
    Family.SCATTER: """
        embedding_dense_backward index_add index_put _index_put_impl _unsafe_index_put scatter scatter_add
        scatter_reduce index_copy index_fill masked_scatter put slice_scatter select_scatter""",
    Family.RANDOM: """
        bernoulli rand rand_like randn randn_like randint randint_like uniform normal native_dropout
        _fused_dropout dropout randperm exponential random rrelu_with_noise multinomial log_normal geometric
        cauchy""",
    Family.SORT: """
        sort argsort topk kthvalue median mode _unique2 unique_dim unique_consecutive""",
}
_OF_OTHERS = {"bitsandbytes.gemm_4bit.default": Family.PRODUCT}
_FAMILIES = {name: family for family, names in _MEMBERS.items() for name in names.split()}
# Operators of our own.
_OWN = {
    "window_attention": Family.ATTENTION,
    "window_attention_backward": Family.ATTENTION_BACKWARD,
    "flex_attention": Family.ATTENTION,
    "flex_attention_backward": Family.ATTENTION_BACKWARD,
}


def base_name(name: str) -> str:
    """The operation of an operator in any form: `"aten._foreach_mul_.Scalar"` -> `"mul"`."""
    operation = name.split(".")[1] if "." in name else name
    return operation.removeprefix("_foreach_").rstrip("_")


def is_in_place(name: str) -> bool:
    """True if the operator writes into its first argument."""
    return "." in name and name.split(".")[1].endswith("_")


def family_of(name: str) -> Family | None:
    """The family of an operator such as `"aten.mm.default"`; None if it is unknown."""
    if name.startswith("profiler."):  # marks of optimizers for a profiler, which take no time
        return Family.FREE
    if name.startswith("tightfit."):
        return _OWN.get(base_name(name))
    return _FAMILIES.get(base_name(name)) if name.startswith("aten.") else _OF_OTHERS.get(name)
