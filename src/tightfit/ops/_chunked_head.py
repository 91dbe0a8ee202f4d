"""The chunk loop of the losses over a linear head: logits, loss and gradient of a few tokens in one buffer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from tightfit.runtime.simulation import simulation

# The gradient of a 16-bit weight is summed in pieces of at most this many bytes, or of a quarter of the chunk's logits
# if that is more. Smaller pieces save no memory beside the logits, and cost launches: with pieces of 4 MiB, a step of
# 1B at 16k tokens ran 67,170 operators, with the larger ones 12,022.
PIECE_BYTES = 4 * 2**20
PIECES_OF_A_CHUNK = 4
# `blocked_product`: blocks of 256 have 0.8 times the error of one long sum over 1000 to 6400 entries. Blocks of 512
# have 0.9 times, and blocks of 128 no less than 256. The number of blocks is limited, because each one costs a launch.
LEAST_SUMMED_AT_ONCE = 256
MOST_BLOCKS = 16


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Tokens:
    """The labels that are not ignored, and their positions."""

    def __init__(self, labels: Tensor, ignore_index: int):
        self.total = len(labels)
        positions = (labels != ignore_index).nonzero().squeeze(1)
        self.count = len(positions)
        self.positions = positions if self.count < self.total else None
        self.labels = self.gather(labels).long()

    def outside(self, vocabulary: int) -> int | None:
        """A label outside of the vocabulary, if there is one."""
        wrong = self.labels[(self.labels < 0) | (self.labels >= vocabulary)]
        return int(wrong[0]) if len(wrong) else None

    def gather(self, values: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """The rows of `values` (N, ...) at the counted tokens `start` to `stop`."""
        if self.positions is None:
            return values[start:stop]
        return values.index_select(0, self.positions[start:stop])

    def scatter_(self, target: Tensor, start: int, stop: int, values: Tensor) -> None:
        """Write `values` to the rows that `gather` reads."""
        if self.positions is None:
            target[start:stop].copy_(values)
        else:
            target.index_copy_(0, self.positions[start:stop], values.to(target.dtype))

    def spread(self, values: Tensor) -> Tensor:
        """Values of the counted tokens at their positions, zero at the others."""
        if self.positions is None:
            return values
        return values.new_zeros(self.total).index_copy_(0, self.positions, values)

    def chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self.count, rows):
            yield start, min(start + rows, self.count)


@dataclass(frozen=True)
class Head:
    """The linear layer: weight (V, D) and bias (V,) in the dtype of the products, hidden (N, D) in its own."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    accumulate: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> "Head":
        cast_bias = None if bias is None else bias.to(dtype)
        return cls(hidden, weight.to(dtype), cast_bias, accumulation_dtype(dtype))

    def logits(self, hidden: Tensor, out: Tensor, narrow: Tensor | None) -> Tensor:
        """The logits of a chunk of hidden states, in the buffer `out`. `narrow` is a buffer of the products' dtype."""
        # `out=`: a new tensor for each chunk would exist beside the last chunk's logits.
        product = (out if narrow is None else narrow)[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=product)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=product)
        return product if narrow is None else out[: len(hidden)].copy_(product)


@dataclass(frozen=True)
class Gradients:
    """Sums of the gradients of hidden, weight and bias, always in fp32 (fp64 for fp64 inputs); None: not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> "Gradients":
        # In the inputs' own 16 bits, small parts of many chunks would be lost in large sums.
        return cls(
            *(
                torch.zeros_like(source, dtype=accumulation_dtype(source.dtype))
                if need and source is not None
                else None
                for source, need in zip((hidden, weight, bias), needed, strict=True)
            )
        )

    def add(self, head: Head, tokens: Tokens, span: tuple[int, int], hidden: Tensor, gradient: Tensor) -> None:
        """Add the part of a chunk: `gradient` (rows, V) of its logits, and `hidden` (rows, D) of the same dtype."""
        if self.hidden is not None:
            tokens.scatter_(self.hidden, *span, blocked_product(gradient, head.weight))
        if self.weight is not None:
            add_product_(self.weight, gradient.t(), hidden)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right. A narrower product is added piece by piece, each summed in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    # The product in the wider dtype exists in pieces only: as a whole it is as large as the weight's gradient.
    most = max(PIECE_BYTES, left.numel() * total.itemsize // PIECES_OF_A_CHUNK)
    rows = max(most // (right.shape[1] * total.itemsize), 1)
    for start in range(0, len(total), rows):
        total[start : start + rows].add_(widened_product(left[start : start + rows], right, total.dtype))


def widened_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right of 16-bit inputs, without rounding the result to 16 bits."""
    if writes_wider(left):
        return torch.mm(left, right, out_dtype=dtype)
    # Without a kernel for `out_dtype` the operands are widened.
    return left.to(dtype) @ right.to(dtype)


def on_cuda(tensor: Tensor) -> bool:
    """True if the tensor is on a CUDA device, or simulates one in a dry run."""
    return tensor.is_cuda or simulation.of_cuda


def writes_wider(operand: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if products of 16-bit operands can write fp32 there: on CUDA, in bf16 from compute capability 8.0 on.

    `dtype`: that of the products, if it is not the operand's.
    """
    if not on_cuda(operand):
        return False
    of_card = simulation.card.capability if simulation.of_cuda else torch.cuda.get_device_capability(operand.device)
    return (dtype or operand.dtype) != torch.bfloat16 or of_card >= (8, 0)


def blocked_product(left: Tensor, right: Tensor) -> Tensor:
    """left (rows, V) @ right (V, D), summed over the vocabulary in blocks, which loses less to rounding."""
    if left.dtype.itemsize < 4:  # the kernel sums in fp32 already; blocks would take a CPU three times as long
        return torch.mm(left, right, out_dtype=torch.float32) if writes_wider(left) else left @ right
    size = max(LEAST_SUMMED_AT_ONCE, math.ceil(len(right) / MOST_BLOCKS))
    total = left[:, :size] @ right[:size]
    for start in range(size, len(right), size):
        total.add_(left[:, start : start + size] @ right[start : start + size])
    return total


class Chunk(NamedTuple):
    """The logits of the counted tokens `start` to `stop`: (rows, V) in the accumulation dtype.

    `narrow` is a free buffer of as many rows in the products' dtype, or None where that is the accumulation dtype.
    """

    logits: Tensor
    start: int
    stop: int
    narrow: Tensor | None


class ChunkLoss(Protocol):
    """The loss of a chunk's tokens, as a function of their logits."""

    def __call__(self, chunk: Chunk, scale: Tensor | None) -> Tensor:
        """The losses (rows,) of a chunk, whose logits are overwritten.

        With `scale` (rows, 1), the logits are overwritten by the gradient of the losses, times `scale`.
        """
        ...


class TokenLoss(Protocol):
    """The loss of each token's logits: cross-entropy with a label, a divergence from a teacher."""

    name: ClassVar[str]  # of the public function, for errors
    # Whether 1 / N comes in fp64, for a loss that multiplies further factors into it and rounds once. Rounded before,
    # its error would be that of every element, and would not average out.
    takes_wide_scale: ClassVar[bool]

    def of_chunks(self, head: Head, tokens: Tokens, rows: int, targets: Sequence[Tensor | None]) -> ChunkLoss:
        """The loss of chunks of at most `rows` tokens. `targets` are the tensors besides labels: a teacher's."""
        ...


def run_chunks(
    head: Head,
    tokens: Tokens,
    loss: TokenLoss,
    targets: Sequence[Tensor | None],
    rows: int,
    scale: Tensor | None = None,
    gradients: Gradients | None = None,
) -> Tensor:
    """The losses (count,) of the counted tokens. Adds the gradient of their sum, weighted by `scale` (count, 1), to
    `gradients`.
    """
    rows = max(min(rows, tokens.count), 1)
    shape = (rows, len(head.weight))
    buffer = torch.empty(shape, dtype=head.accumulate, device=head.hidden.device)
    narrow = None if head.weight.dtype == head.accumulate else torch.empty_like(buffer, dtype=head.weight.dtype)
    of_chunk = loss.of_chunks(head, tokens, rows, targets)
    # fp64: one number for each token is cheap, and the sum over many tokens keeps its digits.
    losses = torch.empty(tokens.count, dtype=torch.float64, device=head.hidden.device)
    for start, stop in tokens.chunks(rows):
        hidden = tokens.gather(head.hidden, start, stop).to(head.weight.dtype)
        logits = head.logits(hidden, buffer, narrow)
        chunk = Chunk(logits, start, stop, None if narrow is None else narrow[: len(logits)])
        if gradients is None or scale is None:
            losses[start:stop] = of_chunk(chunk, None)
            continue
        losses[start:stop] = of_chunk(chunk, scale[start:stop])
        if gradients.bias is not None:
            gradients.bias.add_(logits.sum(dim=0))  # from the wide buffer, before its gradient is rounded below
        gradient = logits if narrow is None else narrow[: len(logits)].copy_(logits)
        gradients.add(head, tokens, (start, stop), hidden, gradient)
    return losses
