"""Scratch memory that an operator allocates and frees before it returns, so that no dispatch mode sees it."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from tightfit.memory.allocator import cpu_rise
from tightfit.runtime.forked import threads_of_steps
from tightfit.runtime.internals import processor_has_amx
from tightfit.tracing import recurrent
from tightfit.tracing.cpu_temporaries import (
    BATCH_NORMS,
    BUFFERED_IN_16_BITS,
    COMPOSITES,
    GROUP_NORM_BACKWARD,
    LAYER_NORM_BACKWARD,
    PROMOTING,
    REDUCED_LOSSES,
    SUMS,
    buffer_in_fp32,
    channel_sums,
    composite_scratch,
    converted_operands,
    converted_sum,
    layer_norm_sums,
    unreduced_loss,
)
from tightfit.tracing.shapes import TensorShape

aten = torch.ops.aten


_RECURRENT = ("aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default")


def cpu_attention_splits(query_length: int, key_length: int) -> tuple[int, int]:
    """The number of rows of q, and of k, on which a thread works at a time.

    Source: `flash_attention_kernel_impl` in ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    query_split = 256 if query_length >= 768 else 64 if query_length >= 192 else 32
    return min(query_split, query_length), min(512, key_length)


def _cpu_attention(inputs: Sequence[TensorShape]) -> int:
    # Per thread, in the accumulation dtype: scores, running maximum, running sum, output. For 16-bit inputs also the
    # scores in 16 bits. Source: `cpu_flash_attention`, same file. Measured equal: tests/tracing/test_workspace.py.
    query, key = inputs[0], inputs[1]
    rows, columns = cpu_attention_splits(query.shape[-2], key.shape[-2])
    width = 8 if query.dtype == torch.float64 else 4
    per_thread = (rows * columns + 2 * rows + rows * query.shape[-1]) * width
    if query.dtype.itemsize == 2:
        per_thread += rows * columns * 2
    return threads_of_steps() * per_thread


def _cpu_attention_backward(inputs: Sequence[TensorShape]) -> int:
    # Per thread: scores and their gradient; for 16-bit inputs both in 16 bits too. Once: a row of sums. A gradient that
    # is not laid out as (batch, length, heads, width) is copied to that layout (measured for all layouts).
    gradient, query, key = inputs[:3]
    rows, columns = cpu_attention_splits(query.shape[-2], key.shape[-2])
    width = 8 if query.dtype == torch.float64 else 4
    per_thread = 2 * rows * columns * width
    products = 0
    if query.dtype.itemsize == 2:
        per_thread += 2 * rows * columns * 2
        lengths = min(query.shape[-2], 768), min(key.shape[-2], 512)
        products = _narrow_products(*lengths, query.shape[-1], query.dtype, threads_of_steps())
    _, heads, length, head_width = gradient.shape
    strides = (length * heads * head_width, head_width, heads * head_width, 1)
    # PyTorch may give a dimension of size 1 any stride: only the other strides are compared.
    sized = zip(gradient.shape, gradient.stride, strides, strict=True)
    in_place = all(size == 1 or stride == wanted for size, stride, wanted in sized)
    return threads_of_steps() * per_thread + rows * width + products + (0 if in_place else gradient.bytes)


@cache
def _narrow_products(query_length: int, key_length: int, width: int, dtype: torch.dtype, threads: int) -> int:
    """Bytes that oneDNN allocates for the products of 16-bit attention.

    They depend on the instruction set, so they are measured: one small head runs for real, at lengths that are split
    like those requested. The bytes that the formula explains are subtracted. `threads` tells apart what is remembered.
    """
    shape_q, shape_k = (1, query_length, 1, width), (1, key_length, 1, width)
    query, key, value = (torch.ones(shape, dtype=dtype).transpose(1, 2) for shape in (shape_q, shape_k, shape_k))
    with torch.no_grad():
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        rise = cpu_rise(
            lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(
                out, query, key, value, out, logsumexp, 0.0, False
            )
        )
    rows, columns = cpu_attention_splits(query_length, key_length)
    explained = torch.get_num_threads() * rows * columns * (2 * 4 + 2 * 2) + rows * 4
    return max(0, rise - explained - query.nbytes - key.nbytes - value.nbytes)


def _cpu_product(operator: Callable[..., torch.Tensor], inputs: Sequence[TensorShape]) -> int:
    *_, left, right = inputs
    if inputs[0].dtype.itemsize != 2:
        return sum(_copied_matrix(shape) for shape in (left, right))
    if left.numel * right.shape[-1] <= LARGEST_PRODUCT:
        return _measured_product(operator, tuple(inputs))
    # Without instructions for 16 bits oneDNN sums into an fp32 buffer of the size of the result, one for each thread of
    # a batch of products. Two small products of the same layouts show it. Their inner size is short: what AMX packs
    # grows with it, and would be taken for such a buffer.
    small, larger = _reduced(inputs, SIDE, SHORT, SIDE), _reduced(inputs, SIDE, SHORT, 2 * SIDE)
    added = _results(larger) - _results(small)
    first, second = _measured_product(operator, small), _measured_product(operator, larger)
    if first == second == 0:  # PyTorch's own kernels: oneDNN takes no 16 bits below AVX-512
        return 0
    if added and second - first >= 4 * added:
        return first + round((second - first) / added * (_results(inputs) - _results(small)))
    # With them it packs blocks of the operands, whose sizes follow no formula, and such products are fast.
    if left.numel * right.shape[-1] <= (LARGEST_WITH_TILES if processor_has_amx() else LARGEST_FAST_PRODUCT):
        return _measured_product(operator, tuple(inputs))
    return _measured_product(operator, _reduced(inputs, *PACKED))


def _copied_matrix(shape: TensorShape) -> int:
    """Bytes of the copy of a matrix, of one at a time in a batch, that BLAS takes in neither order of its dimensions.

    Source: `addmm_impl_cpu_` in ATen/native/LinearAlgebra.cpp, which `baddbmm` calls for each matrix.
    """
    (rows, columns), (down, across) = shape.shape[-2:], shape.stride[-2:]
    is_taken = (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
    return 0 if is_taken else rows * columns * shape.dtype.itemsize


def _results(inputs: Sequence[TensorShape]) -> int:
    """The number of elements of a product, of one in a batch."""
    *_, left, right = inputs
    return left.shape[-2] * right.shape[-1]


def _reduced(inputs: Sequence[TensorShape], rows: int, inner: int, columns: int) -> tuple[TensorShape, ...]:
    """The inputs of a product of at most these sizes, each with its dimensions in the same order of strides."""

    def sizes(shape: TensorShape, *most: int) -> tuple[int, ...]:
        batch, matrix = shape.shape[:-2], shape.shape[-2:]
        last = map(min, matrix, most[-len(matrix) :])
        return (*(min(size, threads_of_steps()) for size in batch), *last)

    *added, left, right = inputs
    found = [(shape, sizes(shape, rows, columns)) for shape in added]
    found += [(left, sizes(left, rows, inner)), (right, sizes(right, inner, columns))]
    return tuple(_in_order_of(shape, reduced) for shape, reduced in found)


def _in_order_of(original: TensorShape, sizes: tuple[int, ...]) -> TensorShape:
    strides, stride = [0] * len(sizes), 1
    for at in sorted(range(len(sizes)), key=lambda at: (original.stride[at], -at)):
        if original.stride[at]:  # an expanded dimension keeps its stride of 0
            strides[at] = stride
            stride *= sizes[at]
    return TensorShape(sizes, tuple(strides), original.dtype)


def _cpu_product_into(operator: Callable[..., torch.Tensor], inputs: Sequence[TensorShape]) -> int:
    return _cpu_product(operator, inputs[:-1])  # compiled code gives the memory of the result, last


def _measured_product(operator: Callable[..., torch.Tensor], inputs: tuple[TensorShape, ...]) -> int:
    """Bytes of scratch memory of a 16-bit product: oneDNN chooses by shape, instruction set and threads."""
    return _run_once(operator, inputs, threads_of_steps())


@cache
def _run_once(operator: Callable[..., torch.Tensor], inputs: tuple[TensorShape, ...], threads: int) -> int:
    """The memory of a product that runs for real. `threads` is a part of the key under which the result is cached."""
    operands = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype).zero_() for s in inputs]
    with torch.no_grad():
        results = [operator(*operands)]
        rise = cpu_rise(lambda: results.append(operator(*operands)))
    return rise - results[0].untyped_storage().nbytes()


def _cpu_adamw8bit(inputs: Sequence[TensorShape]) -> int:
    # At the same time in fp32: both states, the gradient, a root and a quotient; a 16-bit weight too. Source:
    # `_optimizer_update_8bit_blockwise_cpu` in bitsandbytes/backends/cpu/ops.py. Measured equal:
    # tests/optim/test_predicted_peaks.py.
    gradient, weight = inputs[:2]
    return gradient.numel * 4 * (5 if weight.dtype == torch.float32 else 6)


def _cpu_ctc_backward(inputs: Sequence[TensorShape]) -> int:
    # The sums from the other end, as many as forward saved. Source: `ctc_loss_backward_cpu_template` in
    # ATen/native/LossCTC.cpp (`log_beta`). Measured equal: tests/tracing/test_ctc_loss.py.
    return inputs[-1].bytes


_GEMM_4BIT = "bitsandbytes.gemm_4bit.default"


def _cpu_gemm_4bit(source: TensorShape, result: TensorShape) -> int:
    # The weight at full width, and the product's own scratch. Source: `_gemm_4bit_default_impl` in
    # bitsandbytes/backends/default/ops.py. Measured equal: tests/models/test_adapters.py.
    inner, columns = source.shape[-1], result.shape[-1]
    rows = TensorShape((math.prod(source.shape[:-1]), inner), (inner, 1), source.dtype)
    weight = TensorShape((inner, columns), (1, inner), source.dtype)
    return weight.bytes + _cpu_product(aten.mm.default, (rows, weight))


LARGEST_PRODUCT = 2**28  # multiplications of a 16-bit product that runs for real, in a few hundredths of a second
SIDE, SHORT = 256, 32  # rows and columns, and inner size, of the small products that stand for a larger one
LARGEST_FAST_PRODUCT = 2**33  # the same with instructions for 16 bits
LARGEST_WITH_TILES = 2**35  # the same with AMX, in a tenth of a second
PACKED = 2048, 2048, 1024  # rows, inner size and columns from which on blocks hardly grow (notes/)

_PRODUCTS = {
    "mm": aten.mm.default,
    "addmm": aten.addmm.default,
    "bmm": aten.bmm.default,
    "baddbmm": aten.baddbmm.default,
}
_CPU: dict[str, Callable[[Sequence[TensorShape]], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _cpu_attention_backward,
    **{f"aten.{name}.default": partial(_cpu_product, operator) for name, operator in _PRODUCTS.items()},
    **{f"aten.{name}.out": partial(_cpu_product_into, operator) for name, operator in _PRODUCTS.items()},
    "aten._ctc_loss_backward.default": _cpu_ctc_backward,
    "aten._ctc_loss_backward.Tensor": _cpu_ctc_backward,
    "bitsandbytes.optimizer_update_8bit_blockwise.default": _cpu_adamw8bit,
}

_OF_RANKS = frozenset({"tightfit.gather_parts.default", "tightfit.add_up_parts.default"})

Workspace = Callable[[str, Sequence[TensorShape], Sequence[TensorShape], tuple], int]


def _recurrent(name: str, inputs: Sequence[TensorShape]) -> int:
    """Scratch memory of oneDNN's recurrent layer."""
    x, hidden = inputs[0], inputs[2].shape[1]
    found = recurrent.taken(x.shape, hidden, x.dtype)
    if name == _RECURRENT[0]:
        return found.forward
    state = inputs[5]
    given = inputs[10:-1]  # gradients of the output, of the last state and of the last cell, those that there are
    of_output = next((shape for shape in given if len(shape.shape) == 3), None)
    others = len(given) - (of_output is not None)
    output = x.shape[0] * x.shape[1] * hidden * x.dtype.itemsize
    is_copied = of_output is None or of_output.stride != _contiguous(of_output.shape)  # or made of zeros
    return found.backward + (output if is_copied else 0) + (2 - others) * state.bytes


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[1] * shape[2], shape[2], 1)


def cpu_workspace(
    name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape] = (), arguments: tuple = ()
) -> int:
    """Bytes of scratch memory of one operator call on this CPU."""
    if name in PROMOTING:
        return converted_operands(name, inputs)
    if name in _RECURRENT:
        return _recurrent(name, inputs)
    if name in REDUCED_LOSSES:
        return unreduced_loss(name, inputs, outputs)
    if name in SUMS:
        return converted_sum(name, inputs, outputs)
    if name in BUFFERED_IN_16_BITS:
        return buffer_in_fp32(name, inputs, outputs, arguments)
    if name in BATCH_NORMS or name == GROUP_NORM_BACKWARD:
        return channel_sums(name, inputs)
    if name in COMPOSITES:
        return sum(composite_scratch(name, inputs, outputs, arguments))
    if name in _OF_RANKS:  # gloo gathers into a copy of the result, and reduces in a copy of what is given
        return max(shape.bytes for shape in (*inputs, *outputs))
    if name == "aten.repeat.default":  # measured: 32 bytes for each dimension, whatever its size
        return 32 * len(outputs[0].shape)
    if name == _GEMM_4BIT:
        return _cpu_gemm_4bit(inputs[0], outputs[0])
    if name == LAYER_NORM_BACKWARD:
        return layer_norm_sums(inputs, outputs, threads_of_steps())
    formula = _CPU.get(name)
    return 0 if formula is None or math.prod(inputs[0].shape) == 0 else formula(inputs)


_FORMULAS = PROMOTING | REDUCED_LOSSES | COMPOSITES | frozenset(_CPU) | {*_RECURRENT, "aten.repeat.default"}


def has_formula(name: str) -> bool:
    """True if `cpu_workspace` knows what an operator takes, whatever its operands are."""
    return name in _FORMULAS
