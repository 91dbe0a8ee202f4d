"""The longest sequence and the largest batch that a recipe can train within a budget.

The memory of a step is nearly linear in its tokens, once activations outweigh gradients. A few dry runs of a variant
with the levers of least memory give that line for all of its optimizers. A dry run at the size that the line names
confirms it, or corrects it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tightfit.models.loading import position_limit
from tightfit.names.optimizers import OFFLOADED, parse_optimizer
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.recipes.records import Largest
from tightfit.recipes.search import Found, RecipeSearch
from tightfit.recipes.variant_search import VariantSearch
from tightfit.recipes.variants import Variant
from tightfit.step import Batch, TokenBatch
from tightfit.tracing.joined import state_bytes

MULTIPLE = 64  # of a sequence's tokens, which matrix units like
CORRECTIONS = 3  # dry runs that confirm one size
POINTS = 4  # further dry runs of a variant, where a size is read off far from those that were made
FAR = 2  # times the largest size that was run dry, up to which a straight line is believed
NEAR = 0.5  # of a size: how near to a point a size is read off between points
JUMP = 8  # times the largest size that was run dry, for the next
MOST = 2**20  # tokens of a batch, beyond which nothing is tried: a dry run computes with the ids of all tokens
Shape = tuple[int, int]  # sequences, and tokens of each


def resized(batch: Batch, size: int, length: int) -> Batch | None:
    """A batch of as many sequences of as many tokens; None where the batch has other tensors than those of tokens."""
    if isinstance(batch, TokenBatch):
        return batch._replace(size=size, length=length)
    if not isinstance(batch, dict) or "input_ids" not in batch:
        return None
    shape = batch["input_ids"].shape
    if len(shape) != 2 or any(not isinstance(t, torch.Tensor) or t.shape != shape for t in batch.values()):
        return None
    times = (-(-size // shape[0]), -(-length // shape[1]))
    return {name: tensor.repeat(*times)[:size, :length].contiguous() for name, tensor in batch.items()}


def shape_of(batch: Batch) -> Shape | None:
    """Sequences and tokens of a batch; None where it is none of token ids."""
    if resized(batch, 1, 1) is None:
        return None
    return (batch.size, batch.length) if isinstance(batch, TokenBatch) else tuple(batch["input_ids"].shape)


@dataclass(frozen=True)
class _Dimension:
    """What may grow: its value now, which values there are, and the batch of a value."""

    name: str
    now: int
    multiple_of: int
    most: int
    shape: Callable[[int], Shape]


class _Points(dict[int, int]):
    """Bytes of forward and backward at the sizes that were run dry.

    Bytes over sizes are convex: weights and gradients alone first, then a straight line of activations. So what lies
    between two points is at most the chord, and what is read off it fits.
    """

    def largest(self, limit: int, most: int) -> int:
        """The largest size within the limit, between the points or beyond the last two."""
        values = sorted(self)
        within = [value for value in values if self[value] <= limit]
        if not within:
            return values[0]
        low = within[-1]
        above = [value for value in values if value > low]
        if not above:
            above, low = [low], max([value for value in values if value < low], default=low)
        high = above[0]
        slope = (self[high] - self[low]) / (high - low) if high != low else 0.0
        return min(most, int(low + (limit - self[low]) / slope)) if slope > 0 else most


@dataclass
class Sizes:
    """Mutable: the points of the variants, which their optimizers share."""

    search: RecipeSearch
    points: dict[tuple[Variant, str], _Points] = field(default_factory=dict)

    def of(self, found: Found, *, confirm: bool) -> Found:
        """The outcome of a recipe that fits, with its longest sequence and its largest batch."""
        shape = shape_of(self.search.asked.batch)
        if shape is None or found.variant is None or found.candidate is None:
            return found
        size, length = shape
        multiple = MULTIPLE if length % MULTIPLE == 0 else 1
        most = min(position_limit(self.search.asked.model) or MOST, max(length, MOST // size))
        sequence = _Dimension("length", length, multiple, most, lambda n: (size, n))
        count = self.search.asked.count
        batch = _Dimension("size", size, count, max(size, MOST // length), lambda n: (n, length))
        outcome = replace(
            found.outcome,
            longest_sequence=self._largest(found, sequence, confirm),
            largest_batch=self._largest(found, batch, confirm),
        )
        return replace(found, outcome=outcome)

    def _largest(self, found: Found, dimension: _Dimension, confirm: bool) -> Largest:
        variant, now = found.variant, dimension.now
        assert variant is not None, "asked by the caller"
        limit = variant.budget_bytes - UNSEEN_BYTES - self._beside(found)
        points = self._points(found, dimension)

        def within(limit: int, most: int) -> int:
            value = points.largest(limit, most) // dimension.multiple_of * dimension.multiple_of
            return max(now, min(value, most))

        most = dimension.most
        for _ in range(POINTS):
            value = within(limit, most)
            if value <= FAR * max(points) and min(abs(value - known) / known for known in points) < NEAR:
                break
            value = min(value, JUMP * max(points))
            points[value] = self._peak(found, dimension.shape(value))
        is_traced = parse_optimizer(found.recipe.optimizer).kind != OFFLOADED
        for _ in range(CORRECTIONS if confirm and is_traced else 0):
            value = within(limit, most)
            if value == now:
                break
            excess = self._excess(found, dimension.shape(value))
            if excess <= 0:
                return Largest(value, confirmed=True)
            limit, most = limit - excess, value - dimension.multiple_of
        value = within(limit, most)
        return Largest(value, confirmed=value == now)  # the size that was asked about was traced

    def _points(self, found: Found, dimension: _Dimension) -> _Points:
        key = Variant.of(found.recipe), dimension.name
        if key not in self.points:
            now = dimension.now
            other = 2 * now if 2 * now <= dimension.most else max(1, now // 2)
            self.points[key] = _Points({n: self._peak(found, dimension.shape(n)) for n in dict.fromkeys((now, other))})
        return self.points[key]

    def _beside(self, found: Found) -> int:
        """Bytes of the states, and those that the allocator adds to the sums."""
        variant, candidate = found.variant, found.candidate
        assert variant is not None, "asked by the caller"
        assert candidate is not None, "a recipe that fits"
        if parse_optimizer(found.recipe.optimizer).kind == OFFLOADED:
            part = variant.applied_part(candidate.combination, candidate.policies, candidate.joined)
            return max(0, candidate.peak_bytes - part.peak_bytes)
        update = variant.update(found.recipe.optimizer)
        return state_bytes(update) + variant.added_by_allocator(update)

    def _peak(self, found: Found, shape: Shape) -> int:
        search = self._sized(found, shape)
        combination, policies = search.frugal
        return search.applied_part(combination, policies).peak_bytes

    def _excess(self, found: Found, shape: Shape) -> int:
        search = self._sized(found, shape)
        combination, policies = search.frugal
        return search.excess(search.candidate(search.update(found.recipe.optimizer), combination, policies))

    def _sized(self, found: Found, shape: Shape) -> VariantSearch:
        """The variant's search with a batch of another shape."""
        assert found.variant is not None, "asked by the caller"
        batch = self.search.asked.batch
        return found.variant.with_batch(batch if shape == shape_of(batch) else resized(batch, *shape))
