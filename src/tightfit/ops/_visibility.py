"""Computes which keys a query sees, tile by tile, without any tensor over all pairs of positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """The queries [q0, q1) against the keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int


@dataclass(frozen=True)
class Visibility:
    """The limits of visibility, without the mask: see `attention`.

    `groups` query heads share a key head. The first query is at the position of key `offset`.

    `earliest[i]` is the first key that the query at position i sees in its document, the minimum over all rows. Tiles
    that contain only earlier keys are skipped. This changes no bit of the other tiles' sums.
    """

    causal: bool
    window: int | None
    document_ids: Tensor | None
    groups: int
    offset: int = 0
    earliest: Sequence[int] | None = None

    def keys(self, q0: int, q1: int, keys: int) -> range:
        """The keys that a query of [q0, q1) may see by its position."""
        q0, q1 = q0 + self.offset, q1 + self.offset
        first = 0 if self.window is None else max(q0 - self.window + 1, 0)
        last = keys
        if self.causal:
            last = min(q1, keys)
        elif self.window is not None:
            last = min(q1 + self.window - 1, keys)
        return range(first, last)

    def tiles(self, queries: int, keys: int, size: int, q0: int) -> list[Tile]:
        """The tiles of the query chunk that starts at q0, without those in which all keys are hidden."""
        q1 = min(q0 + size, queries)
        seen = self.keys(q0, q1, keys)
        # Document ids do not descend within a row, so the chunk's first query has the earliest document.
        first = 0 if self.earliest is None else self.earliest[q0]
        starts = (k0 for k0 in range(seen.start, seen.stop, size) if k0 + size > first)
        return [Tile(q0, q1, k0, min(k0 + size, seen.stop)) for k0 in starts]

    def hide_(self, scores: Tensor, tile: Tile, mask: Tensor | None) -> None:
        """Write -inf over the scores (B, Hkv, groups, queries, keys) of hidden pairs, and add a float mask."""
        if mask is not None:
            part = self.mask_of(mask, tile)
            if mask.dtype == torch.bool:
                scores.masked_fill_(~part, -torch.inf)
            else:
                scores.add_(part)
        if not self.sees_all(tile):
            scores.masked_fill_(self.out_of_reach(tile, scores.device), -torch.inf)
        if self.document_ids is not None:
            of_queries = self.document_ids[:, None, None, tile.q0 : tile.q1, None]
            of_keys = self.document_ids[:, None, None, None, tile.k0 : tile.k1]
            scores.masked_fill_(of_queries != of_keys, -torch.inf)

    def mask_of(self, mask: Tensor, tile: Tile) -> Tensor:
        """The part of a mask (B, Hq, Tq, Tk), or broadcastable to it, for a tile, as a view with five dimensions."""
        queries = slice(tile.q0, tile.q1) if mask.shape[2] > 1 else slice(None)
        keys = slice(tile.k0, tile.k1) if mask.shape[3] > 1 else slice(None)
        part = mask[:, :, queries, keys]
        return part.unsqueeze(1) if mask.shape[1] == 1 else part.unflatten(1, (-1, self.groups))

    def sees_all(self, tile: Tile) -> bool:
        """True if positions hide no pair of a tile."""
        ahead, behind = tile.k1 - 1 - tile.q0 - self.offset, tile.q1 - 1 + self.offset - tile.k0
        if self.causal and ahead > 0:
            return False
        return self.window is None or max(ahead, behind) < self.window

    def out_of_reach(self, tile: Tile, device: torch.device) -> Tensor:
        """(queries, keys) booleans, True if the position hides the key."""
        i = torch.arange(tile.q0 + self.offset, tile.q1 + self.offset, device=device)[:, None]
        j = torch.arange(tile.k0, tile.k1, device=device)
        if self.window is None:
            return j > i
        far = (i - j) >= self.window
        return far | (j > i if self.causal else (j - i) >= self.window)
