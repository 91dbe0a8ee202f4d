"""The part of a sequence that a rank has, and how parts become the whole: three functions with their gradients.

Of 2n pieces rank r of n has those numbered r and 2n - 1 - r, so that causal attention is equal work for all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.ranks.sharing import add_up_parts, exchanged, gather_parts

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


def split(whole: Tensor, ranks: SequenceRanks) -> Tensor:
    """This rank's part (B, T / n, D) of hidden states (B, T, D) that all have.

    The gradient of the whole is the same on all ranks. Backward divides by n.
    """
    return exchanged(
        whole, lambda whole: ranks.part(whole, TOKENS), lambda part: ranks.whole(part, TOKENS).div_(ranks.size)
    )


def joined(part: Tensor, ranks: SequenceRanks) -> Tensor:
    """Hidden states (B, T, D) of all tokens, on all ranks. Each takes its part of the gradient, n times as large."""
    return exchanged(
        part, lambda part: ranks.whole(part, TOKENS), lambda whole: ranks.part(whole, TOKENS).mul_(ranks.size)
    )


def gathered(part: Tensor, ranks: SequenceRanks) -> Tensor:
    """Keys or values (..., T, D) of all ranks, from (..., T / n, D). Backward adds up what each rank's queries give."""
    side = part.dim() - 2
    return exchanged(part, lambda part: ranks.whole(part, side), lambda whole: ranks.sum(whole, side))
