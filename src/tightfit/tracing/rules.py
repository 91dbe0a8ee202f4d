"""The operators for which a dry run needs more than their meta kernel, each with its reason."""

import enum
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map_only

from tightfit.ops import flex
from tightfit.runtime.internals import installed_release
from tightfit.runtime.simulation import simulation
from tightfit.tracing import recurrent
from tightfit.tracing.unbacked import unbacked_tensor

aten = torch.ops.aten

# An index by a boolean mask has as many rows as the mask has true entries. A mask is usually known data, so it is read.
INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
     aten._unsafe_index.Tensor}
)  # fmt: skip

# Operators whose integer results depend on the values of their input. Each with the position and the default of its
# argument `dim`: the input's size along it bounds the results.
CHOOSING = {
    aten.topk.default: (2, -1),
    aten.sort.default: (1, -1),
    aten.sort.stable: (2, -1),
    aten.argsort.default: (1, -1),
    aten.argmax.default: (1, None),
    aten.argmin.default: (1, None),
    aten.max.dim: (1, None),
    aten.min.dim: (1, None),
    aten.multinomial.default: (None, -1),
}


class _Inside(threading.local):
    """The operator of PyTorch's that a simulated CUDA device runs in this thread. Mutable, one instance: `inside`."""

    operator: bool = False  # whether one runs: inside of it no code of the model can read a number
    adds_in_place: bool = False  # whether it adds in place


inside = _Inside()

# Operators that autograd's formulas run in place, but out of place under a dispatch mode (`areAnyTensorSubclassLike` in
# ATen/native/TensorAdvancedIndexing.cpp and ReduceOps.cpp; `accumulate` in torch/csrc/autograd/input_buffer.cpp).
ADDED_IN_PLACE = frozenset(
    {
        "aten.add.Tensor",
        "aten.index_put.default",
        "aten.index_add.default",
        "aten.scatter_add.default",
        "aten.scatter.src",
        "aten.scatter.value",
        "aten.put.default",
    }
)

PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default", "aten.mv.default"})

_EFFICIENT = aten._scaled_dot_product_efficient_attention.default

# Operators whose result keeps the memory of an intermediate one, because it is resized in place: a reduced elementwise
# loss that of the unreduced loss, an image that of its patches. Source: `TORCH_META_FUNC(mse_loss)`,
# ATen/native/BinaryOps.cpp, Loss.cpp and cuda/Loss.cu; `col2im_cpu`, Col2Im.cpp and cuda/Col2Im.cu.
_REDUCED = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
RESIZED_IN_PLACE = frozenset({*_REDUCED, aten.col2im.default})


def on_host(operator: Any, args: tuple) -> tuple[int, ...]:
    """The positions of results that a card's kernel leaves in the host's memory.

    They are seed and offset of dropout (`_efficient_attention_forward` in native/transformers/cuda/attention.cu); since
    2.14.0 only where there is dropout.
    """
    if operator is not _EFFICIENT:
        return ()
    dropout = args[5] if len(args) > 5 else 0.0
    return (2, 3) if dropout or installed_release() < (2, 14) else ()


def in_kept_memory(operator: Any, result: torch.Tensor, args: tuple) -> torch.Tensor:
    """The result of an operator of `RESIZED_IN_PLACE` over the memory that it keeps."""
    if operator not in _REDUCED:
        count = args[0].numel()
    elif result.dim():
        return result
    else:
        count = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    if count <= result.numel():
        return result
    return unbacked_tensor((count,), (1,), result.dtype).as_strided(result.shape, result.stride())


class Routing(enum.Enum):
    """Assumptions about choices that depend on unknown numbers, such as the experts that a router chooses."""

    BALANCED = "a balanced choice"
    FIRST = "the first for nearly all"
    LAST = "the last for nearly all"
    ONLY_FIRST = "the first for all"
    ONLY_LAST = "the last for all"


# A loop over experts has its peak in one of two places: while the expert with the most tokens runs, or in backward,
# when the small experts before it are done and its activations are still held. Experts with a few tokens add their
# gradients to that. Experts without tokens add gradients only if the loop runs them too.
ONE_SIDED = (Routing.FIRST, Routing.LAST, Routing.ONLY_FIRST, Routing.ONLY_LAST)


def assumed_choice(routing: Routing, shape: torch.Size, bound: int) -> torch.Tensor:
    """Indexes below `bound`, int64 of a shape (..., k): the last dimension holds the k choices of one row."""
    if routing is Routing.BALANCED:
        return balanced_choice(shape.numel(), bound).view(shape)
    several = shape[-1] if len(shape) > 1 else 1
    order = torch.arange(max(bound, several))
    if routing in (Routing.LAST, Routing.ONLY_LAST):
        order = order.roll(several)  # the last ones are preferred
    rows = order[:several].repeat(shape.numel() // max(several, 1), 1)
    if routing in (Routing.FIRST, Routing.LAST):
        others = (
            order[several:].unfold(0, several, several) if len(order) >= 2 * several else order[:0].view(0, several)
        )
        count = min(len(others), len(rows))
        rows[:count] = others[:count]
    return rows.view(shape) % max(bound, 1)


def balanced_choice(count: int, bound: int) -> torch.Tensor:
    """Indexes below `bound`, each about equally often, as a balanced router would choose them."""
    # A prime stride: neighbouring rows choose different experts, and k neighbours never choose one twice.
    return (torch.arange(count) * 7919) % max(bound, 1)


def choice_bound(operator: Any, args: tuple) -> int:
    """The number of candidates among which an operator of `CHOOSING` chooses."""
    position, default = CHOOSING[operator]
    dim = default if position is None or position >= len(args) else args[position]
    source = args[0]
    return source.numel() if dim is None else source.shape[dim]


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    # PyTorch's meta kernel accepts bf16 only. The real kernel pads rows to 16 bytes, which decides the memory.
    dtype = out_dtype or a.dtype
    if offs is not None and a.dim() == 2 and b.dim() == 2:
        shape: tuple[int, ...] = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 2:
        shape = (a.shape[0], b.shape[-1])
    elif b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[-1])
    row = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    strides = [row * shape[-2], row, 1] if len(shape) == 3 else [row, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _nonzero(source: torch.Tensor) -> torch.Tensor:
    # The number of nonzero entries of an unknown tensor is unknown. Assume all of them, the worst case.
    if simulation.of_cuda:
        return torch.empty((source.numel(), source.dim()), dtype=torch.int64, device="meta")
    by_dimension = torch.empty((source.dim(), source.numel()), dtype=torch.int64, device="meta")
    return by_dimension.t()  # native/TensorAdvancedIndexing.cpp


def _masked_select(source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.empty(torch.broadcast_shapes(source.shape, mask.shape).numel(), dtype=source.dtype, device="meta")


def _unique(source: torch.Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    # Where each element is another one, the worst case. Places and counts are there if they are asked for.
    number = source.numel()
    places = source.shape if inverse or counts else (0,)
    return (
        _meta((number,), source.dtype),
        _meta(places, torch.int64),
        _meta((number if counts else 0,), torch.int64),
    )


def _unique_alone(source: torch.Tensor, sorted: bool = True, inverse: bool = False) -> Any:
    return _unique(source, sorted, inverse)[:2]


def _unique_consecutive(
    source: torch.Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> Any:
    return _unique(source, True, inverse, counts) if dim is None else _unique_dim(source, dim)


def _unique_dim(source: torch.Tensor, dim: int, *rest: Any) -> Any:
    number = source.shape[dim]
    return _meta(source.shape, source.dtype), _meta((number,), torch.int64), _meta((number,), torch.int64)


def _bincount(source: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    # The highest number decides; assumed is one that the bins asked for hold, or as many bins as there are numbers.
    kept = torch.int64 if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
    return _meta((minlength or source.numel(),), kept)


def _repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    return _meta((repeats.numel() if output_size is None else output_size,), repeats.dtype)  # each once, if unknown


def _histogram(source: torch.Tensor, bins: int | torch.Tensor = 100, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    number = bins.numel() - 1 if isinstance(bins, torch.Tensor) else bins
    return _meta((number,), source.dtype), _meta((number + 1,), source.dtype)


def _fused_rms_norm(
    source: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    # It has no meta kernel. For 16-bit inputs the reciprocal root is saved in fp32 (layer_norm_kernel.cu).
    kept = source.dim() - len(normalized_shape)
    dtype = torch.float32 if source.dtype.itemsize == 2 else source.dtype
    shape = (*source.shape[:kept], *(1 for _ in normalized_shape))
    return _meta(source.shape, source.dtype), _meta(shape, dtype)


def _fused_rms_norm_backward(
    grad: torch.Tensor, source: torch.Tensor, normalized_shape: Any, rstd: Any, weight: Any, mask: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    into_source = _meta(source.shape, source.dtype) if mask[0] else None
    return into_source, None if weight is None or not mask[1] else _meta(weight.shape, weight.dtype)


def _meta(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, lengths: Any, target_lengths: Any, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # It has no meta kernel. Besides the losses it saves, for each frame, a sum for each label of the longest target and
    # for the blanks around them (`ctc_loss_allocate_outputs`, ATen/native/LossCTC.cpp; LossCTC.cu).
    length, batch, _ = log_probs.shape
    labels = 2 * max(target_lengths, default=0) + 1
    return _meta((batch,), log_probs.dtype), _meta((batch, length, labels), log_probs.dtype)


def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


# Operators whose results' sizes depend on numbers in these arguments: lengths, which are usually known.
LENGTHS = {aten._ctc_loss.Tensor: (2, 3)}

# Operators whose results are as many as numbers say, and what is assumed of numbers that are not known.
COUNTED: dict[Any, str] = {
    aten.nonzero.default: "one for each element",
    aten.masked_select.default: "one for each element",
    **{
        getattr(aten, name).default: "one for each element"
        for name in ("_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive")
    },
    aten.bincount.default: "minlength, else one for each element",
    aten.repeat_interleave.Tensor: "one for each element",
}

# Operators that are never computed, even if their inputs are small and known: those of CUDA, which have no CPU kernel,
# and those whose tensors of lengths were replaced by numbers.
NEVER_COMPUTED = frozenset({flex.FORWARD, flex.BACKWARD, *LENGTHS}) | frozenset(
    getattr(aten, name).default
    for name in (
        "_flash_attention_forward",
        "_flash_attention_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
    )
    if hasattr(aten, name)
)


def _statistics(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype:
    """The dtype of a norm's mean and deviation: `param_scalar_type` in native/cpu/mixed_data_type.h."""
    given = next((p for p in parameters if p is not None), None)
    return torch.float32 if given is not None and given.dtype == torch.float32 else x.dtype


def _native_layer_norm(x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    out, *statistics = aten.native_layer_norm.default(x, shape, weight, bias, eps)
    # The meta kernel has those of CUDA, which are fp32 (native/cuda/layer_norm_kernel.cu, `acc_type`).
    wanted = torch.float32 if simulation.of_cuda else _statistics(x, weight, bias)
    return out, *(x.new_empty(s.shape, dtype=wanted if s.dtype == torch.float32 else s.dtype) for s in statistics)


def _as_suggested(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the input's memory format: channels last, or contiguous however the input lies."""
    # `suggest_memory_format_contig` in native/Normalization.cpp. The meta kernel keeps the strides of the input.
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        return torch.empty_like(like, memory_format=torch.channels_last)
    if like.dim() == 5 and like.is_contiguous(memory_format=torch.channels_last_3d) and not like.is_contiguous():
        return torch.empty_like(like, memory_format=torch.channels_last_3d)
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _native_group_norm(x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    _, *statistics = aten.native_group_norm.default(x, weight, bias, *rest)
    # native/group_norm.cpp: the same on every device. The meta kernel has the input's dtype, and since torch 2.14 no
    # channels-last results.
    return _as_suggested(x), *(x.new_empty(s.shape, dtype=_statistics(x, weight, bias)) for s in statistics)


def _native_group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    of_input, *of_parameters = aten.native_group_norm_backward.default(gradient, x, *rest)
    # The meta kernel of torch 2.14 has the layout of the gradient that came.
    return None if of_input is None else _as_suggested(x), *of_parameters


def _batch_norm(operator: Any) -> Callable[..., Any]:
    def rule(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
        found = operator(x, weight, bias, mean, var, training, *rest)
        if simulation.of_cuda:
            return found
        # native/Normalization.cpp: nothing is saved where the running statistics are used.
        size, dtype = x.shape[1] if training else 0, _statistics(x, weight, bias, mean, var)
        return _as_suggested(x), _meta((size,), dtype), _meta((size,), dtype)

    return rule


def _channels_last(x: torch.Tensor) -> torch.memory_format | None:
    """The format of an image or a video whose channels are last in memory; None for all others."""
    kind = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return kind if kind is not None and x.is_contiguous(memory_format=kind) and not x.is_contiguous() else None


def _is_channels_last(x: torch.Tensor) -> bool:
    return _channels_last(x) is not None


def _roll(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    found = aten.roll.default(x, *rest)
    return torch.empty_like(x) if not simulation.of_cuda and _is_channels_last(x) else found


def _as_suggested_on_cpu(operator: Any) -> Callable[..., torch.Tensor]:
    """The rule of an operator whose result is channels last on a CPU if its input is (`suggest_memory_format`)."""

    def rule(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found = operator(x, *rest)
        kind = None if simulation.of_cuda else _channels_last(x)
        return found if kind is None else torch.empty_like(found, memory_format=kind)

    return rule


def _pixel_unshuffle(x: torch.Tensor, factor: int) -> torch.Tensor:
    found = aten.pixel_unshuffle.default(x, factor)
    return found.contiguous() if simulation.of_cuda else found


def _batch_norm_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    of_x, *others = aten.native_batch_norm_backward.default(grad, x, *rest)
    in_training = rest[5]  # otherwise a card's kernel lies as the gradient and the input do
    is_as_told = of_x is None or (simulation.of_cuda and not in_training)
    return (of_x if is_as_told else _as_suggested(x), *others)


def _native_layer_norm_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    # native/layer_norm.cpp and cuda/layer_norm_kernel.cu: contiguous. The meta kernel lies as gradient and input do.
    of_x, *others = aten.native_layer_norm_backward.default(grad, x, *rest)
    return (None if of_x is None else _meta(of_x.shape, of_x.dtype), *others)


def _contiguous(operator: Any) -> Callable[..., Any]:
    """The rule of an operator whose results are contiguous, and in the meta kernel as its operands."""

    def rule(*args: Any, **options: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: _meta(x.shape, x.dtype), operator(*args, **options))

    return rule


def _as_gradient(operator: Any) -> Callable[..., torch.Tensor]:
    """The rule of an elementwise gradient that lies as its first operand, and in the meta kernel as its second.

    Source: the order of operands in `TensorIterator::borrowing_binary_op`, ATen/native/Activation.cpp.
    """

    def rule(grad: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found = operator(grad, *rest, **options)
        return torch.mul(grad, found).to(found.dtype)

    return rule


def _log_sigmoid_forward(x: torch.Tensor) -> Any:
    result, buffer = aten.log_sigmoid_forward.default(x)
    if simulation.of_cuda:
        return result, _meta((0,), x.dtype)  # `log_sigmoid_forward_cuda` in cuda/ActivationLogSigmoidKernel.cu
    return _meta(result.shape, result.dtype), _meta(buffer.shape, buffer.dtype)  # contiguous: native/Activation.cpp


def _padding(operator: Any) -> Callable[..., torch.Tensor]:
    """The rule of a padding of images, or of its gradient: channels last as the input, which the meta kernel is not."""

    def rule(*args: Any) -> torch.Tensor:
        found = operator(*args)
        source = args[0] if isinstance(args[1], list | tuple) else args[1]
        kind = None if simulation.of_cuda else _channels_last(source)
        return found if kind is None else torch.empty_like(found, memory_format=kind)

    return rule


PADDINGS = (
    aten.reflection_pad2d.default,
    aten.reflection_pad2d_backward.default,
    aten.replication_pad2d.default,
    aten.replication_pad2d_backward.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
)

# Source: ATen/native/Loss.cpp (`zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)`), Activation.cpp, SoftMax.cpp and
# Pow.cpp.
CONTIGUOUS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten._log_softmax_backward_data.default,
    aten.rrelu_with_noise.default,
    aten.rrelu_with_noise_backward.default,
    aten.glu_backward.default,
    aten.pow.Scalar,
)
AS_GRADIENT = (
    aten.elu_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.softplus_backward.default,
)


def _mkldnn_rnn_layer(x: torch.Tensor, *rest: Any) -> Any:
    found = aten.mkldnn_rnn_layer.default(x, *rest)
    hidden, in_training = rest[9], rest[14]
    if not in_training:
        return found
    return *found[:3], _meta((recurrent.taken(x.shape, hidden, x.dtype).workspace,), torch.uint8)


def _mkldnn_rnn_layer_backward(*args: Any) -> Any:
    found = aten.mkldnn_rnn_layer_backward.default(*args)
    return *found[:4], torch.empty_like(found[4]), *found[5:]  # the two biases have gradients of their own


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
    # `mkldnn_conv_use_channels_last`, `cudnn_conv_suggest_memory_format` in native/ConvUtils.h. The meta kernel, which
    # knows no device, has a contiguous result.
    found = aten.convolution.default(x, weight, bias, *rest)
    if simulation.of_cuda and torch.float64 in (x.dtype, weight.dtype):
        return found
    layout = _layout_of_convolution(x, weight, *rest)
    return found if layout is torch.contiguous_format else _laid_out(found, layout)


def _laid_out(found: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    if found.dim() == 3:  # a sequence is an image of one row
        return found.unsqueeze(2).contiguous(memory_format=layout).squeeze(2)
    return found.contiguous(memory_format=layout)


def _layout_of_convolution(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.memory_format:
    if x.dim() == 3:  # native/Convolution.cpp: `input.contiguous()`, then `view4d`
        x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    if x.dim() == 5 and not simulation.of_cuda and not _takes_onednn(x, weight, *rest):
        return torch.contiguous_format  # `slow_conv3d` and its like, unlike those of images
    formats = {suggest_memory_format(x), suggest_memory_format(weight)} & {torch.channels_last, torch.channels_last_3d}
    return formats.pop() if formats else torch.contiguous_format


def _takes_onednn(x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, *rest: Any) -> bool:
    """True if a CPU leaves a convolution to oneDNN: `ConvParams::use_mkldnn` in native/Convolution.cpp."""
    if not torch.backends.mkldnn.enabled or x.dtype == torch.float64:
        return False
    if x.dtype != torch.float32:
        return True
    groups, (high, wide) = rest[2], weight.shape[-2:]
    is_dense = {*stride} == {1} == {*dilation}
    is_worth_it = not is_dense or x.shape[0] >= 16 or (high, wide) != (1, 1) or torch.get_num_threads() > 1
    is_large = groups > 1 or min(high, wide) > 3 or x.shape[0] > 1 or x.shape[:4].numel() > 20480
    return is_worth_it and is_large


def _convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    found = aten.convolution_backward.default(gradient, x, weight, bias, *rest)
    if not simulation.of_cuda and x.dim() == 5 and not _takes_onednn(x, weight, *rest):
        return *(None if each is None else _meta(each.shape, each.dtype) for each in found[:2]), found[2]
    if x.dim() == 3 and not (simulation.of_cuda and torch.float64 in (x.dtype, weight.dtype)):
        layout = _layout_of_convolution(x, weight, *rest)
        return *(None if each is None else _laid_out(each, layout) for each in found[:2]), found[2]
    if installed_release() >= (2, 13) or torch.float64 in (x.dtype, weight.dtype):
        return found
    # The meta kernel of earlier releases has the layout of the gradient that came; kernels have that of forward.
    layout = _layout_of_convolution(x, weight, *rest)
    return *(None if each is None else each.contiguous(memory_format=layout) for each in found[:2]), found[2]


def _as_input(grad: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty_like(source)


def _drawn(source: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return _meta(source.shape, source.dtype)


def _fake_quantize(source: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)


def _learnt_quantize(source: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty_like(source)


def _learnt_quantize_backward(
    grad: torch.Tensor, source: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # native/quantized/FakeQuantPerTensorAffine.cpp and FakeQuantPerChannelAffine.cpp
    return torch.empty_like(source), _meta(scale.shape, scale.dtype), _meta(zero_point.shape, zero_point.dtype)


def _least_squares(
    matrix: torch.Tensor, other: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    # `linalg_lstsq` in native/BatchLinearAlgebra.cpp. The matrix is taken to have full rank.
    driver = driver or ("gels" if simulation.of_cuda else "gelsy")
    rows, columns = matrix.shape[-2:]
    is_vector = other.dim() == 1 or (matrix.dim() - 1 == other.dim() and other.shape == matrix.shape[:-1])
    count = 1 if is_vector else other.shape[-1]
    batch = torch.broadcast_shapes(matrix.shape[:-2], other.shape[: -1 if is_vector else -2])
    solution = _meta((*batch, count, max(rows, columns)), matrix.dtype).mT[..., :columns, :]
    real, none = matrix.dtype.to_real(), (0,)
    return (
        solution.squeeze(-1) if is_vector else solution,
        _meta((*batch, count) if rows > columns and driver != "gelsy" else none, real),
        _meta(none if driver == "gels" else batch, torch.int64),
        _meta((*batch, min(rows, columns)) if driver in ("gelsd", "gelss") else none, real),
    )


SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    aten.linalg_lstsq.default: _least_squares,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    # Those without a meta kernel. Source: ATen/native/Distributions.cpp, LossMultiMargin.cpp, LossMultiLabelMargin.cpp,
    # quantized/
    **{
        getattr(aten, name).default: _drawn
        for name in ("_standard_gamma_grad", "_sample_dirichlet", "_dirichlet_grad", "binomial")
    },
    aten.multi_margin_loss_backward.default: _as_input,
    aten.multilabel_margin_loss_backward.default: _as_input,
    aten.fractional_max_pool3d_backward.default: _as_input,
    aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantize,
    aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantize,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _fake_quantize,
    **{
        getattr(aten, f"_fake_quantize_learnable_per_{kind}_affine{way}").default: rule
        for kind in ("tensor", "channel")
        for way, rule in (("", _learnt_quantize), ("_backward", _learnt_quantize_backward))
    },
    **{
        operator: _batch_norm(operator)
        for operator in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
    },
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.roll.default: _roll,
    **{
        operator: _as_suggested_on_cpu(operator)
        for operator in (aten.max_unpool2d.default, aten.channel_shuffle.default, aten.native_channel_shuffle.default)
    },
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.native_layer_norm.default: _native_layer_norm,
    aten.native_layer_norm_backward.default: _native_layer_norm_backward,
    **{operator: _contiguous(operator) for operator in CONTIGUOUS},
    **{operator: _as_gradient(operator) for operator in AS_GRADIENT},
    **{operator: _padding(operator) for operator in PADDINGS},
    aten.log_sigmoid_forward.default: _log_sigmoid_forward,
    aten.native_group_norm.default: _native_group_norm,
    aten.native_group_norm_backward.default: _native_group_norm_backward,
    aten._cudnn_rnn.default: recurrent.cudnn_results,
    aten._cudnn_rnn_backward.default: recurrent.cudnn_gradients,
    aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
    aten.mkldnn_rnn_layer_backward.default: _mkldnn_rnn_layer_backward,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique.default: _unique_alone,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_dim,
    aten.unique_dim_consecutive.default: _unique_dim,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.histogram.bin_ct: _histogram,
    aten.histogram.bins_tensor: _histogram,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
if hasattr(aten, "_grouped_mm"):
    SHAPE_RULES[aten._grouped_mm.default] = _grouped_mm
if hasattr(aten, "_fused_rms_norm"):
    SHAPE_RULES[aten._fused_rms_norm.default] = _fused_rms_norm
    SHAPE_RULES[aten._fused_rms_norm_backward.default] = _fused_rms_norm_backward
