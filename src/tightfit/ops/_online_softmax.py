"""Attention tile by tile: online softmax forward, recomputed probabilities backward.

Forward, per chunk of queries, over its tiles: with s a tile's scores and m the running maximum,
m' = max(m, max s), l' = l exp(m - m') + sum exp(s - m'), o' = o exp(m - m') + exp(s - m') v; the output is o / l
(Milakov and Gimelshein 2018; Rabe and Staats 2021). Backward, with the probabilities p = exp(s - m) / l:
dv += pᵀ do, ds = p (do vᵀ - sum(do * o)), dq += ds k, dk += dsᵀ q (Dao et al. 2022).

The log-sum-exp is saved as its two parts m and l. Rounding their sum m + log l would change all probabilities of a row
together, which made gradients in fp32 a quarter less exact than those of a plain softmax. The division by l is applied
to do, one row at a time.
"""

from typing import Any

import torch
from torch import Tensor

from tightfit.ops._once import differentiable_once
from tightfit.ops._visibility import Tile, Visibility


class ChunkedAttention(torch.autograd.Function):
    """See `attention`. mask has four dimensions. Saves the inputs, the output and one log-sum-exp for each query."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        visibility: Visibility,
        scale: float,
        chunk_size: int,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            tiles = Tiles(q, k, v, mask, visibility, scale, chunk_size)
            out = q.new_empty(*q.shape[:3], v.shape[3])
            log_sum = q.new_empty(*q.shape[:3], 2, dtype=tiles.dtype)
            for q0 in tiles.starts():
                chunk, chunk_log_sum = tiles.attend(q0)
                tiles.spread_(out, q0, chunk)
                tiles.spread_(log_sum, q0, chunk_log_sum)
        ctx.save_for_backward(q, k, v, mask, out, log_sum)
        ctx.how = visibility, scale, chunk_size
        return out

    @staticmethod
    @differentiable_once("attention")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, log_sum = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            tiles = Tiles(q, k, v, mask, *ctx.how)
            made = Sums(tiles, ctx.needs_input_grad)
            for q0 in tiles.starts():
                made.add(q0, tiles.chunk(gradients[0], q0), tiles.chunk(out, q0), tiles.chunk(log_sum, q0))
        return (*made.results(), None, None, None)


class Tiles:
    """Cuts attention into tiles. A chunk of queries is (B, Hkv, groups * queries, D), in fp32 or fp64, scaled."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        visibility: Visibility,
        scale: float,
        chunk_size: int,
    ):
        self.q, self.k, self.v, self.mask = q, k, v, mask
        self.visibility, self.scale, self.size = visibility, scale, chunk_size
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def starts(self) -> range:
        return range(0, self.q.shape[2], self.size)

    def of(self, q0: int) -> list[Tile]:
        return self.visibility.tiles(self.q.shape[2], self.k.shape[2], self.size, q0)

    def chunk(self, values: Tensor, q0: int) -> Tensor:
        """Queries [q0, q0 + size) of `values` (B, Hq, Tq, n), with those that share a key head next to each other."""
        part = values[:, :, q0 : q0 + self.size].to(self.dtype)
        return part.reshape(part.shape[0], self.k.shape[1], -1, part.shape[3])

    def queries(self, q0: int) -> Tensor:
        return self.chunk(self.q, q0) * self.scale

    def spread_(self, target: Tensor, q0: int, chunk: Tensor) -> None:
        """Write a chunk to the place from which `chunk` read it."""
        part = target[:, :, q0 : q0 + self.size]
        part.copy_(chunk.reshape(part.shape))

    def keys(self, tile: Tile) -> Tensor:
        return self.k[:, :, tile.k0 : tile.k1].to(self.dtype)

    def values(self, tile: Tile) -> Tensor:
        return self.v[:, :, tile.k0 : tile.k1].to(self.dtype)

    def by_group(self, scores: Tensor) -> Tensor:
        """(B, Hkv, groups * queries, keys) as (B, Hkv, groups, queries, keys)."""
        return scores.unflatten(2, (self.visibility.groups, -1))

    def over_queries(self, pairs: Tensor, rows: Tensor) -> Tensor:
        """pairsᵀ rows (B, Hkv, keys, n). It is summed for each query head first, which loses less to rounding."""
        return (self.by_group(pairs).mT @ self.by_group(rows)).sum(dim=2)

    def scores(self, queries: Tensor, keys: Tensor, tile: Tile) -> Tensor:
        scores = queries @ keys.mT
        self.visibility.hide_(self.by_group(scores), tile, self.mask)
        return scores

    def attend(self, q0: int) -> tuple[Tensor, Tensor]:
        """Output (..., Dv) of a chunk; maximum and sum of exponentials (..., 2). 0, 0 and 1 if no key is visible."""
        queries = self.queries(q0)
        out = queries.new_zeros(*queries.shape[:3], self.v.shape[3])
        total = queries.new_zeros(*queries.shape[:3], 1)
        highest = torch.full_like(total, -torch.inf)
        for tile in self.of(q0):
            scores = self.scores(queries, self.keys(tile), tile)
            before, highest = highest, torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
            # A query that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
            subtracted = highest.masked_fill(highest == -torch.inf, 0)
            weights = scores.sub_(subtracted).exp_()
            shrink = (before - subtracted).exp_()
            total.mul_(shrink).add_(weights.sum(dim=-1, keepdim=True))
            out.mul_(shrink).add_(weights @ self.values(tile))
        total.masked_fill_(total == 0, 1)  # a query without visible keys gives zeros, not NaN
        highest = highest.masked_fill(highest == -torch.inf, 0)
        return out.div_(total), torch.cat((highest, total), dim=-1)


class Sums:
    """The gradients of q, k, v and the mask. All except that of q are summed over the chunks of queries."""

    def __init__(self, tiles: Tiles, needed: tuple[bool, ...]):
        of_q, of_k, of_v, of_mask = needed[:4]
        self.tiles = tiles
        # A chunk writes its part of q's gradient once. The others are sums over chunks, so they need zeros in fp32.
        self.q = torch.empty_like(tiles.q) if of_q else None
        self.k = torch.zeros_like(tiles.k, dtype=tiles.dtype) if of_k else None
        self.v = torch.zeros_like(tiles.v, dtype=tiles.dtype) if of_v else None
        self.mask = torch.zeros_like(tiles.mask, dtype=tiles.dtype) if of_mask and tiles.mask is not None else None

    def add(self, q0: int, gradient: Tensor, out: Tensor, log_sum: Tensor) -> None:
        """Add the part of the chunk at q0, from the gradient of its output, its output, and its maximum and sum."""
        tiles = self.tiles
        queries = tiles.queries(q0)
        of_queries = torch.zeros_like(queries)
        highest, total = log_sum.split(1, dim=-1)
        gradient = gradient / total
        # fp64 costs little for one number per query, and it is subtracted from every score's gradient.
        correction = (gradient.double() * out).sum(dim=-1, keepdim=True).to(tiles.dtype)
        for tile in tiles.of(q0):
            keys = tiles.keys(tile)
            weights = tiles.scores(queries, keys, tile).sub_(highest).exp_()
            if self.v is not None:
                self.v[:, :, tile.k0 : tile.k1].add_(tiles.over_queries(weights, gradient))
            of_scores = (gradient @ tiles.values(tile).mT).sub_(correction).mul_(weights)
            del weights  # one buffer of scores less while the products below run
            self.add_to_mask(tile, of_scores)
            if self.q is not None:
                of_queries.add_(of_scores @ keys)
            if self.k is not None:
                self.k[:, :, tile.k0 : tile.k1].add_(tiles.over_queries(of_scores, queries))
        if self.q is not None:
            tiles.spread_(self.q, q0, of_queries.mul_(tiles.scale))

    def add_to_mask(self, tile: Tile, of_scores: Tensor) -> None:
        if self.mask is not None:
            part = self.tiles.visibility.mask_of(self.mask, tile)
            part.add_(self.tiles.by_group(of_scores).sum_to_size(part.shape))

    def results(self) -> list[Tensor | None]:
        sources = self.tiles.q, self.tiles.k, self.tiles.v, self.tiles.mask
        made = self.q, self.k, self.v, self.mask
        return [
            None if gradient is None or source is None else gradient.to(source.dtype)
            for gradient, source in zip(made, sources, strict=True)
        ]
