"""The part of a sequence that a rank has, and how parts become the whole: three functions with their gradients.

Of 2n pieces rank r of n has those numbered r and 2n - 1 - r, so that causal attention is equal work for all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.ranks.sharing import add_up_parts, gather_parts

TOKENS = 1  # the dimension of hidden states (B, T, D) along which they are divided


class SequenceRanks(NamedTuple):
    """The ranks that share a sequence, and this one's number. `group` is the name of their process group."""

    group: str
    number: int
    size: int

    def own_pieces(self, whole: Tensor, side: int) -> list[Tensor]:
        """Views of this rank's two pieces of a tensor along a dimension."""
        length = whole.shape[side] // (2 * self.size)
        return [whole.narrow(side, piece * length, length) for piece in self.pieces(self.number)]

    def pieces(self, number: int) -> tuple[int, int]:
        """The numbers of a rank's pieces."""
        return number, 2 * self.size - 1 - number

    def part(self, whole: Tensor, side: int) -> Tensor:
        """This rank's part of a tensor, with memory of its own."""
        return torch.cat(self.own_pieces(whole, side), side)

    def whole(self, part: Tensor, side: int) -> Tensor:
        """All parts along a dimension, counted from the front, in the order of the tokens."""
        parts = gather_parts(part.contiguous(), self.size, self.group)
        length = part.shape[side] // 2
        first = [parts[number].narrow(side, 0, length) for number in range(self.size)]
        second = [parts[number].narrow(side, length, length) for number in reversed(range(self.size))]
        return torch.cat([*first, *second], side)

    def sum(self, whole: Tensor, side: int) -> Tensor:
        """This rank's part of the sum of what each rank has for the whole."""
        length = whole.shape[side] // (2 * self.size)
        shape = list(whole.shape)
        shape[side] = 2 * length
        parts = whole.new_empty((self.size, *shape))
        for number in range(self.size):
            for place, piece in enumerate(self.pieces(number)):
                parts[number].narrow(side, place * length, length).copy_(whole.narrow(side, piece * length, length))
        return add_up_parts(parts, self.size, self.group)


class _SplitSequence(torch.autograd.Function):
    """Each rank takes its part of what all have. The gradient of the whole is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.part(whole, TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.whole(gradients[0], TOKENS).div_(ctx.ranks.size), None


class _Joined(torch.autograd.Function):
    """The parts become the whole on all ranks. Each takes its part of the gradient, n times as large."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.whole(part, TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.part(gradients[0], TOKENS).mul_(ctx.ranks.size), None


class _GatheredSequence(torch.autograd.Function):
    """Keys or values (..., T / n, D) of all ranks, (..., T, D). Each rank's queries give them a gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.whole(part, part.dim() - 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.sum(gradients[0], gradients[0].dim() - 2), None


def split(whole: Tensor, ranks: SequenceRanks) -> Tensor:
    """This rank's part (B, T / n, D) of hidden states (B, T, D) that all have. Backward divides by n."""
    return _SplitSequence.apply(whole, ranks)  # type: ignore[return-value]


def joined(part: Tensor, ranks: SequenceRanks) -> Tensor:
    """Hidden states (B, T, D) of all tokens, on all ranks. Backward multiplies by n."""
    return _Joined.apply(part, ranks)  # type: ignore[return-value]


def gathered(part: Tensor, ranks: SequenceRanks) -> Tensor:
    """Keys or values (..., T, D) of all ranks. Backward adds up what each rank's queries give them."""
    return _GatheredSequence.apply(part, ranks)  # type: ignore[return-value]
