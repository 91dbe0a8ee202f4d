"""The sequence that ranks of context parallel share while a forward runs."""

from typing import Any

import torch
from torch import Tensor

from tightfit.errors import ModelError
from tightfit.ranks.sequence_parts import TOKENS, SequenceRanks
from tightfit.runtime.simulation import simulation

OR_FSDP2 = "take parallel='fsdp2'"


class SharedSequence:
    """Mutable: the sequence that the ranks share in the forward that runs."""

    def __init__(self, ranks: SequenceRanks, dtype: torch.dtype | None):
        self.ranks = ranks
        self.dtype = dtype  # in which blocks compute; None: that of hidden states
        self.length: int | None = None  # of the whole sequence; None between two forwards
        self.mask: Tensor | None = None
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, beside the whole: no other gets it meanwhile
        self.tried: set[type] = set()  # classes of blocks in which tokens meet in attention only, by real numbers

    @property
    def part_length(self) -> int:
        assert self.length is not None, "a forward runs"
        return self.length // self.ranks.size

    def begin(self, hidden: Tensor, others: Any) -> None:
        """A forward begins. Raises `ModelError` for a length that the ranks cannot share evenly."""
        self.end()
        length, share = hidden.shape[TOKENS], 2 * self.ranks.size
        if length % share:
            raise ModelError(
                f"sequences have {length} tokens, and {self.ranks.size} ranks share a multiple of {share} evenly: "
                "pad the batch, or take another length"
            )
        self.length = length
        masked = any(isinstance(t, Tensor) and t.dim() > 2 and t.shape[-2:] == (length, length) for t in others)
        if not (masked or on_card(hidden)):
            self.mask = self._causal_mask(hidden, length)

    def end(self) -> None:
        self.length = self.mask = None
        self._parts.clear()

    def part_of(self, given: Any, path: str) -> Any:
        """This rank's part of an argument of a block, if it is a tensor with an entry for each token."""
        if not isinstance(given, Tensor) or given.dim() == 0:
            return given
        known = self._parts.get(id(given))
        if known is None:
            side = _side_of_tokens(given)
            if given.shape[side] == 1:
                return given
            if given.shape[side] != self.length:
                raise ModelError(
                    f"{path} reads a tensor of shape {tuple(given.shape)} beside hidden states of {self.length} "
                    f"tokens, and which part of it belongs to a rank is not known: {OR_FSDP2}"
                )
            # Made once for all blocks, as the whole is. Its gradient on each rank is n times that of the rank's tokens,
            # and zero for the others, so what FSDP2 averages in the end is the sum.
            known = self._parts[id(given)] = given, self.ranks.part(given, side)
        return known[1]

    def _causal_mask(self, hidden: Tensor, length: int) -> Tensor:
        """(T / n, T), 0 where a query of this rank sees the key, and -inf elsewhere."""
        positions = torch.arange(length, device=hidden.device)
        hides = self.ranks.part(positions, 0)[:, None] < positions
        mask = torch.zeros(hides.shape, dtype=self.dtype or hidden.dtype, device=hidden.device)
        return mask.masked_fill_(hides, -torch.inf)


def _side_of_tokens(given: Tensor) -> int:
    """The dimension that counts tokens: ids (B, T), rotations (T, D), (B, T, D) or (B, 1, T, D), masks (B, 1, T, T)."""
    if given.dim() == 2:
        return 0 if given.is_floating_point() else 1
    return {1: 0, 3: 1}.get(given.dim(), given.dim() - 2)


def on_card(tensor: Tensor) -> bool:
    """True if a tensor is on a card, or simulates one that is."""
    return tensor.is_cuda or simulation.of_cuda
