"""Counts the work of an operator from shapes: multiply-adds, bytes and elements."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tightfit.devices.families import Family, base_name, family_of, is_in_place

# Operators that call others (TensorShape.cpp and TensorAdvancedIndexing.cpp of ATen): zeros, a view of them
# and a copy; a copy, which is then filled.
CALLS_WITHIN = {"slice_backward": 3, "select_backward": 3, "masked_fill": 2}
HALVES = ("bfloat16", "float16")
ALIGNED_BYTES = 16  # the size of a vector load: rows that are no multiple of it are loaded number by number
ROWS_OF_A_PARTIAL_SUM = 10  # NROWS_PER_THREAD in PyTorch's EmbeddingBackwardKernel.cu


class CostedTensor(Protocol):
    """The properties of a tensor on which the cost of an operator depends."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class ProductShape(NamedTuple):
    """`batch` products of (rows, inner) with (inner, columns). A "t" in `layout` marks a transposed side."""

    batch: int
    rows: int
    columns: int
    inner: int
    layout: str = "nn"


class AttentionShape(NamedTuple):
    """Scaled dot product attention over `heads` (batch times query heads)."""

    heads: int
    query_length: int
    key_length: int
    width: int
    causal: bool

    @property
    def scores(self) -> int:
        """Pairs of query and key, including those that a causal mask hides."""
        return self.heads * self.query_length * self.key_length


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one call. `fresh_bytes` are the sizes of newly allocated outputs.

    `even` says that all large tensors have the same memory layout, so a kernel can process them as one line.
    `row_bytes` is the size of a normalised row. `picked_rows` is the number of rows from which a loss picks a number.
    `block_rows` is the number of rows for each of which a softmax on CUDA takes a block of threads. `sorted_elements`
    is how many numbers are written where indices are sorted first, so that rows with the same index are summed in a
    fixed order (0: they are not). `calls` is the number of operators that the host calls for it. `widens` says that
    numbers are cast to a wider dtype.
    """

    family: Family
    dtype: str  # "float32" (wider ones and integers too), "bfloat16" (narrower ones too), "float16" or "mixed"
    bytes: int
    elements: int
    fresh_bytes: tuple[int, ...] = ()
    products: tuple[ProductShape, ...] = ()
    attention: AttentionShape | None = None
    even: bool = True
    row_bytes: int = 0
    picked_rows: int = 0
    block_rows: int = 0
    sorted_elements: int = 0
    calls: int = 1
    widens: bool = False

    @property
    def precision(self) -> str:
        """`"float32"`, or `"half"` if 16-bit numbers take part."""
        return "float32" if self.dtype == "float32" else "half"


def work_of(
    name: str, inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor], arguments: tuple[Any, ...] = ()
) -> Work:
    """The work of one call of the operator `name` (`"aten.mm.default"`).

    `inputs` and `outputs` are all input and output tensors, including those in lists. `arguments` are the positional
    arguments that are not tensors. An unknown operator counts as arithmetic over its bytes.
    """
    family = _family(name, inputs, outputs, arguments)
    written = () if is_in_place(name) or _fills_its_argument(name) or family is Family.FREE else outputs
    return Work(
        family,
        _dtype(name, family, inputs, outputs),
        _bytes_moved(name, family, inputs, outputs, arguments),
        _scattered(inputs) if family is Family.SCATTER else max(map(_numel, (*inputs, *outputs)), default=0),
        tuple(_bytes(t) for t in written),
        _products(name, inputs, outputs, arguments) if family is Family.PRODUCT else (),
        _attention(name, inputs[family is Family.ATTENTION_BACKWARD :], arguments) if _is_attention(family) else None,
        _lie_alike((*inputs, *outputs)) if not _takes_lists(name) else True,
        _row_bytes(inputs) if family in (Family.SOFTMAX, Family.SOFTMAX_BACKWARD) else 0,
        _numel(inputs[1]) if base_name(name) == "nll_loss_forward" and len(inputs) > 1 else 0,
        _block_rows(inputs) if family in (Family.SOFTMAX, Family.SOFTMAX_BACKWARD) else 0,
        _sorted_elements(inputs, outputs) if family is Family.SCATTER and _sums_sorted(name, arguments) else 0,
        1 if is_in_place(name) else CALLS_WITHIN.get(base_name(name), 1),
        family is Family.COPY and _widens(name, inputs, outputs),
    )


def _dtype(name: str, family: Family, inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor]) -> str:
    """The dtype that decides the kernel's rate."""
    # Only the first input counts for attention (the query, or the gradient in backward), and only the operands count
    # for a product. The log-sum-exp in fp32, or a sum in a wider dtype, would make them "mixed".
    if _is_attention(family):
        return dtype_key(inputs[:1], ())
    if family is Family.PRODUCT:
        first = _first_operand(name)
        # `mm` and `addmm` with `out_dtype` have a sum and a result that are wider than the operands.
        return dtype_key(inputs[first : first + 2] if ".dtype" in name else inputs, ())
    return dtype_key(inputs, outputs)


def dtype_key(inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor]) -> str:
    """The floating dtype in which an operator works; `"mixed"` for 16 and 32 bits together."""
    floating = {t.dtype for t in (*inputs, *outputs) if t.dtype.is_floating_point and len(t.shape) > 0}
    halves = {dtype for dtype in floating if dtype.itemsize <= 2}
    if not halves:
        return "float32"
    if len(floating) > len(halves):
        return "mixed"
    return "float16" if torch.float16 in halves else "bfloat16"


def _family(
    name: str, inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor], arguments: tuple[Any, ...]
) -> Family:
    family = family_of(name) or Family.ARITHMETIC
    if family is Family.ERROR_FUNCTION and base_name(name) == "pow" and arguments[-1:] in ((2,), (2.0,), (0.5,), (1,)):
        return Family.ARITHMETIC
    if family is Family.COPY and _turns_layout((*inputs, *outputs)):
        return Family.TRANSPOSE
    if family is Family.PRODUCT and (not inputs or _is_depthwise(name, inputs)):
        return Family.ARITHMETIC
    return family


def _widens(name: str, inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor]) -> bool:
    into_first = is_in_place(name)  # `copy_` has its target before its source
    sources, targets = (inputs[1:2], inputs[:1]) if into_first else (inputs[:1], outputs[:1])
    pairs = zip(sources, targets, strict=False)
    return any(a.dtype.is_floating_point and a.dtype.itemsize < b.dtype.itemsize for a, b in pairs)


def _is_attention(family: Family) -> bool:
    return family in (Family.ATTENTION, Family.ATTENTION_BACKWARD)


# Bytes


def _numel(tensor: CostedTensor) -> int:
    """Distinct elements: a broadcast dimension has stride 0 and is read from the cache."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride, strict=True) if stride != 0 or size == 0)


def _bytes(tensor: CostedTensor) -> int:
    return _numel(tensor) * tensor.dtype.itemsize


def _takes_lists(name: str) -> bool:
    return "_foreach_" in name or "._fused_" in name


def _lie_alike(tensors: Sequence[CostedTensor]) -> bool:
    """True if all tensors as large as the largest have its strides and no gaps, and none is broadcast to it."""
    largest = max(tensors, key=lambda t: math.prod(t.shape), default=None)
    if largest is None:
        return True
    size = math.prod(largest.shape)
    alike = [t for t in tensors if math.prod(t.shape) == size]
    strides = {t.stride for t in alike if len(t.shape) == len(largest.shape)}
    spread = [t for t in tensors if 1 < math.prod(t.shape) < size]
    return len(strides) <= 1 and not spread and all(_is_dense(t) for t in alike)


def _is_dense(tensor: CostedTensor) -> bool:
    """True if the elements fill one range of memory, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _row_bytes(inputs: Sequence[CostedTensor]) -> int:
    return inputs[0].shape[-1] * inputs[0].dtype.itemsize if inputs and inputs[0].shape else 0


def _block_rows(inputs: Sequence[CostedTensor]) -> int:
    """Rows too long for one warp: of more than 1,024 numbers or 4 KiB (aten/src/ATen/native/cuda/SoftMax.cu)."""
    if not inputs or not inputs[0].shape:
        return 0
    length = inputs[0].shape[-1]
    return _numel(inputs[0]) // length if length > 1024 or _row_bytes(inputs) > 4096 else 0


def _rows_are_contiguous(tensor: CostedTensor) -> bool:
    return tensor.stride[-1] <= 1 or tensor.shape[-1] == 1


def _turns_layout(tensors: Sequence[CostedTensor]) -> bool:
    """True if rows that are contiguous on one side are strided on the other."""
    return len({_rows_are_contiguous(t) for t in tensors if len(t.shape) > 1}) > 1


def _bytes_moved(
    name: str,
    family: Family,
    inputs: Sequence[CostedTensor],
    outputs: Sequence[CostedTensor],
    arguments: tuple[Any, ...],
) -> int:
    read, written = sum(map(_bytes, inputs)), sum(map(_bytes, outputs))
    if _fills_its_argument(name):
        read -= written  # the result is among the inputs, and is only written
    if family is Family.FREE:
        return 0
    if family is Family.FILL:
        # The gradient of a slice is copied into new zeros.
        copied = 2 * read if base_name(name) in ("slice_backward", "select_backward") else 0
        return copied + (written or sum(map(_bytes, inputs[:1])))
    if family is Family.GATHER:
        return 2 * written + sum(_bytes(t) for t in inputs if not t.dtype.is_floating_point)
    if family is Family.NORM_BACKWARD and inputs:
        # The kernels need a contiguous gradient: a broadcast one is written out first.
        spread = math.prod(inputs[0].shape) - _numel(inputs[0])
        return read + written + 2 * spread * inputs[0].dtype.itemsize
    if base_name(name) in ("nll_loss_forward", "nll_loss2d_forward"):
        return read - _bytes(inputs[0]) + written  # the kernel reads one number of each row of its first input
    if base_name(name) == "masked_fill" and not is_in_place(name):
        return read + 3 * written  # a copy, which is then filled
    if base_name(name) == "copy" and is_in_place(name):
        return read  # the inputs are source and target, and the target is only written
    if family is Family.SCATTER and is_in_place(name) and not _sums_sorted(name, arguments):
        # Only the elements that the index names are read and written, not the whole target.
        touched = _scattered(inputs) * (inputs[0].dtype.itemsize if inputs else 0)
        return 2 * touched + sum(_bytes(t) for t in inputs if not t.dtype.is_floating_point)
    if base_name(name).startswith("_fused_adam"):
        return read + 3 * sum(map(_bytes, inputs[: _list_length(arguments)]))  # parameter and both moments
    if is_in_place(name):
        return read + sum(map(_bytes, inputs[: _list_length(arguments)]))
    if base_name(name).startswith("convolution"):
        return (read + written) * max(1, math.prod(inputs[-1].shape[2:]) if inputs else 1)
    return read + written


def _fills_its_argument(name: str) -> bool:
    """True if an operator has `out=`: `aten.mm.out`, `aten.mm.dtype_out`."""
    return name.rpartition(".")[2].endswith("out")


def _list_length(arguments: tuple[Any, ...]) -> int:
    """The number of tensors of a foreach operator; 1 for any other."""
    return len(arguments[0]) if arguments and isinstance(arguments[0], list | tuple) else 1


def _sums_sorted(name: str, arguments: tuple[Any, ...]) -> bool:
    """True if CUDA's kernel sorts the indices: in an embedding's backward, and in an `index_put` that accumulates."""
    return base_name(name) == "embedding_dense_backward" or ("index_put" in base_name(name) and True in arguments)


def _scattered(inputs: Sequence[CostedTensor]) -> int:
    """The number of elements written by index: those of the smaller of table and source."""
    values = [_numel(t) for t in inputs if t.dtype.is_floating_point] or [_numel(t) for t in inputs]
    return min(values, default=0)


def _sorted_elements(inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor]) -> int:
    """The numbers that CUDA writes and reads again where it sums rows in the order of their indices.

    Ten rows of one index make a partial sum, which is written, read again and added up to a row of the table
    (aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu). Indices are assumed to be drawn evenly from the table.
    """
    table = outputs[0] if outputs else inputs[0]
    width = math.prod(table.shape[1:])
    rows, added = table.shape[0], _scattered(inputs) // max(1, width)
    distinct = rows * -math.expm1(-added / max(1, rows))
    partial = distinct + added / ROWS_OF_A_PARTIAL_SUM
    return round((distinct + 2 * partial) * width)


# Products


def is_aligned(product: ProductShape, numbers: int) -> bool:
    """True if rows of both sides and of the result begin at multiples of `numbers` numbers."""
    _, m, n, k, layout = product
    left, right = layout
    return all(length % numbers == 0 for length in (k if left == "n" else m, n if right == "n" else k, n))


def _transposed(tensor: CostedTensor) -> str:
    return "n" if tensor.stride[-1] == 1 or tensor.shape[-1] == 1 else "t"


def _product(a: CostedTensor, b: CostedTensor) -> ProductShape:
    batch = a.shape[0] if len(a.shape) == 3 else 1
    return ProductShape(batch, a.shape[-2], b.shape[-1], a.shape[-1], _transposed(a) + _transposed(b))


def _products(
    name: str, inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor], arguments: tuple[Any, ...]
) -> tuple[ProductShape, ...]:
    base = base_name(name)
    if "convolution" in base:
        return _convolution(base, inputs, outputs)
    if base.startswith("_cudnn_rnn"):
        return _recurrent(inputs) * (2 if base.endswith("backward") else 1)
    if base in ("linear", "mkldnn_linear", "gemm_4bit"):
        (*lead, inner), columns = inputs[0].shape, outputs[0].shape[-1]
        return (ProductShape(1, math.prod(lead), columns, inner, "nt"),)
    first = _first_operand(name)
    a, b = inputs[first], inputs[first + 1]
    return (_grouped(a, b, inputs[first + 2 :]),) if "grouped" in base else (_product(a, b),)


def _recurrent(inputs: Sequence[CostedTensor]) -> tuple[ProductShape, ...]:
    """Each weight of a recurrent network with all rows of all steps. That steps wait for each other is not priced."""
    *weights, _ = itertools.takewhile(lambda tensor: len(tensor.shape) < 3, inputs[1:])  # and their common memory
    rows = math.prod(inputs[0].shape[:-1])
    return tuple(ProductShape(1, rows, *weight.shape, "nt") for weight in weights if len(weight.shape) == 2)


def _first_operand(name: str) -> int:
    """The place of a product's left matrix among the inputs."""
    return 1 if base_name(name) in ("addmm", "baddbmm", "addbmm", "_addmm_activation") else 0


def _grouped(a: CostedTensor, b: CostedTensor, offsets: Sequence[CostedTensor]) -> ProductShape:
    """One product for each group. Groups are assumed to have equal shares of a two-dimensional side."""
    layout = _transposed(a) + _transposed(b)
    if len(a.shape) == 3 and len(b.shape) == 3:
        return _product(a, b)
    groups = max(1, math.prod(offsets[0].shape)) if offsets else 1
    if len(a.shape) == 2 and len(b.shape) == 2:
        return ProductShape(groups, a.shape[0], b.shape[1], -(-a.shape[1] // groups), layout)
    if len(a.shape) == 2:
        return ProductShape(groups, -(-a.shape[0] // groups), b.shape[-1], a.shape[1], layout)
    return ProductShape(groups, a.shape[-2], -(-b.shape[1] // groups), a.shape[-1], layout)


def _convolution(
    base: str, inputs: Sequence[CostedTensor], outputs: Sequence[CostedTensor]
) -> tuple[ProductShape, ...]:
    """A convolution as the product of unfolded patches with the kernel. Backward is two such products."""
    backward = base.startswith("convolution_backward")
    weight, result = (inputs[2], inputs[0]) if backward else (inputs[1], outputs[0])
    positions = result.shape[0] * math.prod(result.shape[2:])
    product = ProductShape(1, positions, weight.shape[0], math.prod(weight.shape[1:]))
    return (product, product) if backward else (product,)


def _is_depthwise(name: str, inputs: Sequence[CostedTensor]) -> bool:
    """True if a convolution has one channel per group. It multiplies too little, and is limited by memory."""
    if "convolution" not in base_name(name):
        return False
    weight = inputs[2] if "backward" in name else inputs[1]
    return weight.shape[1] == 1 and weight.shape[0] > 1


# Attention


def _attention(name: str, inputs: Sequence[CostedTensor], arguments: tuple[Any, ...]) -> AttentionShape:
    """The shape of attention from query and key (B, H, T, D), which come first, and the arguments about visibility."""
    query, key = inputs[0], inputs[1]
    if base_name(name).startswith("_flash_attention_"):
        return _joined_sequences(inputs, _is_causal(arguments))
    batch, heads, length, width = query.shape
    keys, causal = key.shape[-2], _is_causal(arguments)
    if base_name(name).startswith("flex_attention"):
        return AttentionShape(batch * heads, length, arguments[-1], width, False)  # the keys that a query meets
    if name.startswith("tightfit."):
        # Our own operator ends with (..., causal, window, scale). A query is charged for its whole window, because the
        # shapes do not show how many keys the documents hide.
        causal, window, _ = arguments[-3:]
        if window is not None:
            keys, causal = min(keys, window if causal else 2 * window - 1), False
    return AttentionShape(batch * heads, length, keys, width, causal)


def _joined_sequences(inputs: Sequence[CostedTensor], causal: bool) -> AttentionShape:
    """Attention within sequences that are joined to one (T, H, D). The shapes do not show the lengths: equal ones."""
    (queries, heads, width), keys = inputs[0].shape, inputs[1].shape[0]
    offsets = next(t.shape[0] for t in inputs if len(t.shape) == 1 and not t.dtype.is_floating_point)
    count = max(1, offsets - 1)
    return AttentionShape(count * heads, -(-queries // count), -(-keys // count), width, causal)


def _is_causal(arguments: tuple[Any, ...]) -> bool:
    """The causal flag, which follows the dropout probability."""
    dropout = next((place for place, argument in enumerate(arguments) if isinstance(argument, float)), len(arguments))
    return next((argument for argument in arguments[dropout:] if isinstance(argument, bool)), False)
