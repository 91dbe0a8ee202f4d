"""The operator calls that a calibration times: one representative for each family of operators.

On a CPU each call of a product or a stream has other operands than the call before, as in a step, where hundreds of
megabytes pass through the processor's cache between two uses of a tensor.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tightfit.devices.families import STREAM_UNITS, UNITS, Family
from tightfit.devices.spec import Kind
from tightfit.devices.timing import Call

aten = torch.ops.aten

HEAD = 64  # elements in a row of a head
ROW = 512  # elements in a row for norms, reductions, sorts and gathers
HALVES = {"cpu": (torch.bfloat16,), "cuda": (torch.bfloat16, torch.float16)}
SERIAL = frozenset({Family.SCAN, Family.SCATTER, Family.RANDOM, Family.SORT})  # slow on a CPU: fewer elements


class ProductCase(NamedTuple):
    """One product, or a batch of products.

    `kind` is "batched", or the layout of the two sides, with "unaligned-" before it where rows of a side or of the
    result do not begin at multiples of a vector load.
    """

    kind: str
    dtype: torch.dtype
    batch: int
    rows: int
    columns: int
    inner: int


class AttentionCase(NamedTuple):
    """Attention over `heads` of `length` queries and keys, forward or backward."""

    backward: bool
    causal: bool
    dtype: torch.dtype
    heads: int
    length: int
    width: int


class StreamCase(NamedTuple):
    """A memory-bound or elementwise operator on `elements`. It has two dtypes if they are mixed."""

    family: Family
    dtype: torch.dtype
    other: torch.dtype
    elements: int


POOL = 2**24  # numbers: 64 MiB in fp32, more than the caches of most processors
MOST_TURNS = 256


@dataclass(frozen=True)
class Buffers:
    """Tensors of random numbers, made once and shared by all calls, without the user's generators."""

    device: torch.device
    generator: torch.Generator
    made: dict[tuple, torch.Tensor]

    @classmethod
    def on(cls, device: torch.device) -> "Buffers":
        return cls(device, torch.Generator(device).manual_seed(0), {})

    def get(self, shape: tuple[int, ...], dtype: torch.dtype, use: str = "read") -> torch.Tensor:
        """The tensor of this shape and dtype. Each `use` has its own."""
        key = (shape, dtype, use)
        if key not in self.made:
            random = torch.rand(shape, generator=self.generator, device=self.device, dtype=torch.float32)
            self.made[key] = random.to(dtype)
        return self.made[key]

    def in_turns(self, make: Callable[["Turn"], Call]) -> Call:
        """A call that has other operands each time, so that a CPU's cache does not hold them from the time before.

        `make` asks the `Turn` that it is given for its operands. On CUDA all turns are one.
        """
        first = Turn(self, 0)
        call = make(first)
        if self.device.type != "cpu" or first.turns == 1:
            return call
        rest = (make(Turn(self, turn)) for turn in range(1, first.turns))
        calls = itertools.cycle([call, *rest])
        return lambda: next(calls)()


@dataclass
class Turn:
    """The operands of one of several equal calls. They lie in a pool of random numbers, each turn's behind the last's.

    `turns` is the number of calls after which the operands are the first ones again.
    """

    buffers: Buffers
    number: int
    turns: int = MOST_TURNS

    def get(self, shape: tuple[int, ...], dtype: torch.dtype, use: str = "read") -> torch.Tensor:
        """A tensor of this shape and dtype. Each `use` has its own."""
        size = math.prod(shape)
        places = POOL // size
        if self.buffers.device.type != "cpu" or places < 2:
            self.turns = 1
            return self.buffers.get(shape, dtype, use)
        self.turns = min(self.turns, places)
        pool = self.buffers.get((POOL,), dtype, "out" if use == "out" else "read")
        # Operands of one turn lie apart: the second side begins in the middle of the pool.
        place = (self.number if use in ("read", "out") else self.number + places // 2) % places
        return pool[place * size : (place + 1) * size].view(shape)


# Products

# Rows, columns, inner: each of the three sides long, short and even, so that the fit can separate five coefficients.
_SIDES = ((32, 32, 32), (1024, 1024, 128), (1024, 128, 1024), (128, 1024, 1024), (512, 512, 512), (1024, 256, 512),
          (256, 1024, 512), (2048, 1024, 256), (512, 256, 1536))  # fmt: skip
_SHORT_SIDES = ((32, 32, 32), (256, 256, 64), (256, 64, 256), (64, 256, 256))  # a CPU may emulate the dtype, slowly
_BATCHES = ((8, 32, 32, 32), (16, 256, 256, 64), (16, 256, 64, 256), (4, 512, 512, 64), (4, 512, 512, 256),
            (4, 128, 512, 256))  # fmt: skip
_ON_CUDA = 4  # factor of every side
_LARGE_ON_CUDA = ((8192, 8192, 4096), (16384, 4096, 2048))  # as in the blocks of large models: a card's full rate


# As in a loss head whose vocabulary is odd: scores, and the gradients of hidden states and of weights.
_ODD_ON_CUDA = (("nt", 8192, 16385, 1024), ("nn", 8192, 1024, 16385), ("tn", 16385, 1024, 8192))


def product_cases(kind: Kind) -> Iterator[ProductCase]:
    scale = _ON_CUDA if kind == "cuda" else 1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sides = _SIDES if dtype in (torch.float32, *HALVES[kind]) else _SHORT_SIDES
        for layout in ("nn", "nt", "tn", "tt"):
            for rows, columns, inner in sides:
                yield ProductCase(layout, dtype, 1, rows * scale, columns * scale, inner * scale)
            for rows, columns, inner in _LARGE_ON_CUDA if kind == "cuda" else ():
                yield ProductCase(layout, dtype, 1, rows, columns, inner)
        for layout, *sides in _ODD_ON_CUDA if kind == "cuda" and dtype in HALVES[kind] else ():
            yield ProductCase(f"unaligned-{layout}", dtype, 1, *sides)
        if dtype in (torch.float32, *HALVES[kind]):
            for batch, rows, columns, inner in _BATCHES:
                yield ProductCase("batched", dtype, batch, rows * scale, columns * scale, inner)


def smaller_product(case: ProductCase) -> ProductCase | None:
    """A product that takes less memory and is made of as many alike: half the batch, or half of each side."""
    if case.batch > 1:
        return case._replace(batch=case.batch // 2)
    rows, columns, inner = (side // 2 | (side > 1 and side % 2) for side in case[3:])  # odd ones stay odd
    return case._replace(rows=rows, columns=columns, inner=inner) if min(rows, columns, inner) else None


def product_call(case: ProductCase, buffers: Buffers) -> Call:
    return buffers.in_turns(lambda turn: _product_call(case, turn))


def _product_call(case: ProductCase, buffers: Turn) -> Call:
    _, dtype, batch, m, n, k = case
    if case.kind == "batched":
        a, b = buffers.get((batch, m, k), dtype), buffers.get((batch, n, k), dtype).transpose(1, 2)
        out = buffers.get((batch, m, n), dtype, "out")
        return lambda: torch.bmm(a, b, out=out)
    left, right = case.kind[-2:]
    a = buffers.get((m, k), dtype) if left == "n" else buffers.get((k, m), dtype).t()
    b = buffers.get((k, n), dtype, "right") if right == "n" else buffers.get((n, k), dtype, "right").t()
    out = buffers.get((m, n), dtype, "out")
    return lambda: torch.mm(a, b, out=out)


# Attention

_LENGTHS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (256, 1024, 4096)}
_HEADS = {"cpu": 1, "cuda": 32}  # at the longest
_WIDTHS = {"cpu": (32, 128), "cuda": (32, 64, 128)}  # a card has kernels of its own for each


def attention_cases(kind: Kind) -> Iterator[AttentionCase]:
    longest = _LENGTHS[kind][-1]
    heads = max(_HEADS[kind], torch.get_num_threads()) if kind == "cpu" else _HEADS[kind]
    for backward in (False, True):
        for causal in (False, True):
            for dtype in (torch.float32, *HALVES[kind]):
                # Long attention that is not causal takes a CPU seconds, and language models have little of it.
                for length in _LENGTHS[kind] if causal or kind == "cuda" else _LENGTHS[kind][:-1]:
                    for width in _WIDTHS[kind]:
                        yield AttentionCase(backward, causal, dtype, heads * longest // length, length, width)


def smaller_attention(case: AttentionCase) -> AttentionCase | None:
    """The same attention over half of the heads. Where no kernel of a card does it without, scores have memory."""
    return case._replace(heads=case.heads // 2) if case.heads > 1 else None


def attention_call(case: AttentionCase, buffers: Buffers) -> Call:
    shape = (1, case.heads, case.length, case.width)
    q, k, v = (buffers.get(shape, case.dtype, use).detach() for use in "qkv")
    attend = torch.nn.functional.scaled_dot_product_attention
    if not case.backward:
        return lambda: attend(q, k, v, is_causal=case.causal)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    with torch.enable_grad():
        result = attend(q, k, v, is_causal=case.causal)
    gradient = buffers.get(shape, case.dtype, "gradient")
    return lambda: torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True)


# Streams

_ELEMENTS = {"cpu": (64, 2**15, 2**18, 2**20, 2**22), "cuda": (64, 2**18, 2**22, 2**24, 2**26)}
_MOST_SERIAL = {"cpu": 2**18, "cuda": 2**24}


def stream_cases(kind: Kind) -> Iterator[StreamCase]:
    for family in STREAM_UNITS if kind == "cpu" else UNITS:
        pairs = [(dtype, dtype) for dtype in (torch.float32, *HALVES[kind])]
        if family in (Family.COPY, Family.ARITHMETIC, Family.UNEVEN):
            pairs.append((torch.float32, torch.bfloat16))
        if family is Family.WIDENING:
            pairs = [(torch.bfloat16, torch.float32)]
        for dtype, other in pairs:
            for elements in _ELEMENTS[kind]:
                if family not in SERIAL or elements <= _MOST_SERIAL[kind]:
                    yield StreamCase(family, dtype, other, elements)


def smaller_stream(case: StreamCase) -> StreamCase | None:
    """Half of the elements, in whole rows."""
    return case._replace(elements=case.elements // 2) if case.elements > ROW else None


def stream_call(case: StreamCase, buffers: Buffers) -> Call:
    return buffers.in_turns(lambda turn: _stream_call(case, turn))


def _stream_call(case: StreamCase, buffers: Turn) -> Call:
    width = min(ROW, case.elements)
    shape = (case.elements // width, width)
    x, y, out = (buffers.get(shape, case.dtype, use) for use in ("read", "other", "out"))
    row = buffers.get((width,), case.dtype)
    rows = torch.arange(shape[0], device=x.device)
    match case.family:
        case Family.FILL:
            return lambda: out.fill_(1.0)
        case Family.COPY | Family.WIDENING:
            target = buffers.get(shape, case.other, "out")
            return lambda: target.copy_(x)
        case Family.TRANSPOSE:
            turned = buffers.get((width, shape[0]), case.dtype).t()
            return lambda: out.copy_(turned)
        case Family.ARITHMETIC:
            second = buffers.get(shape, case.other, "other")
            return lambda: torch.mul(x, second, out=out)
        case Family.UNEVEN:
            # As positions are rotated: heads that lie apart, times angles that all heads share.
            heads = buffers.get(shape, case.other, "other").view(shape[0], -1, HEAD).transpose(0, 1)
            angles, result = buffers.get((shape[0], HEAD), case.dtype), out.view(-1, shape[0], HEAD)
            return lambda: torch.mul(heads, angles, out=result)
        case Family.TRANSCENDENTAL:
            return lambda: aten.silu.out(x, out=out)
        case Family.ERROR_FUNCTION:
            return lambda: aten.gelu.out(x, out=out)
        case Family.REDUCTION:
            return lambda: torch.sum(x, dim=-1)
        case Family.SCAN:
            return lambda: torch.cumsum(x, -1, out=out)
        case Family.SOFTMAX:
            return lambda: aten._log_softmax.out(x, -1, False, out=out)
        case Family.SOFTMAX_BACKWARD:
            return lambda: aten._log_softmax_backward_data.out(x, y, -1, case.dtype, out=out)
        case Family.NORM:
            return lambda: torch.native_layer_norm(x, [width], row, row, 1e-5)
        case Family.NORM_BACKWARD:
            _, mean, deviation = torch.native_layer_norm(x, [width], row, row, 1e-5)
            backward = aten.native_layer_norm_backward.default
            return lambda: backward(y, x, [width], mean, deviation, row, row, [True, True, True])
        case Family.GATHER:
            return lambda: torch.index_select(x, 0, rows, out=out)
        case Family.SCATTER:
            return lambda: aten.embedding_dense_backward.default(x, rows, shape[0], -1, False)
        case Family.RANDOM:
            # As dropout draws. A processor guesses an even draw wrong half of the time, which doubles the seconds.
            return lambda: out.bernoulli_(0.9, generator=buffers.buffers.generator)
        case Family.SORT:
            return lambda: torch.sort(x, -1)
    raise AssertionError(f"no representative of {case.family}")


def stream_bytes(case: StreamCase) -> int:
    """Bytes that the call of `stream_call` reads and writes."""
    width, other = case.dtype.itemsize, case.other.itemsize
    row_index = 8 * max(1, case.elements // ROW)
    moved = {
        Family.FILL: width,
        Family.COPY: width + other,
        Family.WIDENING: width + other,
        Family.TRANSPOSE: 2 * width,
        Family.ARITHMETIC: 2 * width + other,
        Family.REDUCTION: width,
        Family.GATHER: 2 * width,
    }
    return moved[case.family] * case.elements + (row_index if case.family is Family.GATHER else 0)
