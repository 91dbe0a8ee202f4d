"""The longest sequence and the largest batch that a recipe can train within a budget.

The memory of a step is nearly linear in its tokens, once activations outweigh gradients. A few dry runs of a variant
with the levers of least memory give that line for all of its optimizers. The other dimension needs only one run more:
it has about the same line at another height. A dry run at the size that the line names confirms it, or corrects it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tightfit.names import OFFLOADED, parse_optimizer
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.search import Search
from tightfit.recipes.batches import Dimension, Shape, dimensions_of, resized, shape_of
from tightfit.recipes.records import Largest
from tightfit.recipes.search import Found, RecipeSearch
from tightfit.recipes.variants import Variant
from tightfit.recipes.whole_step import Levers, frugal_levers, keeping_attention
from tightfit.tracing.joined import state_bytes

CORRECTIONS = 6  # dry runs that confirm one size
NOT_WORTH_A_RUN = 0.02  # of a size that fits: a larger one is not looked for
WIDE = 0.1  # of a size that fits: how far away one that does not is worth another run, whatever the bytes say
WITH_ATTENTION = 3  # dry runs that look for a larger size with attention kept
POINTS = 4  # further dry runs of a variant, where a size is read off far from those that were made
FAR = 2  # times the largest size that was run dry, up to which a straight line is believed
NEAR = 0.5  # of a size: how near to a point a size is read off between points
JUMP = 8  # times the largest size that was run dry, for the next


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
    """Mutable: the points of the variants, which their optimizers share, by the dimension's name and present size."""

    search: RecipeSearch
    points: dict[tuple[Variant, str, int], _Points] = field(default_factory=dict)
    recomputing: set[Variant] = field(default_factory=set)  # variants whose peak no kept attention lowers
    levers: dict[int, tuple[Levers, Levers | None]] = field(default_factory=dict)  # of a search, by its id

    def of(self, found: Found, *, confirm: bool) -> Found:
        """The outcome of a recipe that fits, with its longest sequence and its largest batch."""
        asked = self.search.asked
        dimensions = dimensions_of(asked.model, asked.batch, asked.micro_batches)
        if dimensions is None or found.variant is None or found.candidate is None:
            return found
        sequence, batch = dimensions
        outcome = replace(
            found.outcome,
            longest_sequence=self._largest(found, sequence, confirm),
            largest_batch=self._largest(found, batch, confirm),
        )
        return replace(found, outcome=outcome)

    def _largest(self, found: Found, dimension: Dimension, confirm: bool) -> Largest:
        variant, now = found.variant, dimension.now
        assert variant is not None, "asked by the caller"
        limit = variant.budget_bytes - UNSEEN_BYTES - self._beside(found)
        points = self._points(found, dimension)
        most = dimension.most

        def within(points: _Points) -> int:
            value = points.largest(limit, most) // dimension.multiple_of * dimension.multiple_of
            return max(now, min(value, most))

        guide = self._guide(found, dimension, points)
        is_traced = parse_optimizer(found.recipe.optimizer).kind != OFFLOADED
        if guide is None or not (confirm and is_traced):
            if guide is not None and (value := within(guide)) not in points:
                points[value] = self._peak(found, dimension.shape(value))
            self._explore(found, dimension, points, within)
        value = within(points if guide is None else guide)
        if not (confirm and is_traced):
            value = within(points)
            return Largest(value, confirmed=value == now)  # the size that was asked about was traced
        fits, room, fails, lacking, step = now, None, None, 0, dimension.multiple_of
        for _ in range(CORRECTIONS):
            near = max(step, NOT_WORTH_A_RUN * fits)
            if fails is not None and not fits + near <= value < fails:
                # What the allocator cannot use is no matter of a line: a size between what fits and what does not.
                share = 0.5 if room is None else room / (room + lacking)
                value = (fits + int(share * (fails - fits))) // step * step
                if value - fits < near and fails - fits > WIDE * fits:
                    value = (fits + fails) // 2 // step * step
            if value - fits < near:
                break
            points[value], excess = self._peak_and_excess(found, dimension.shape(value))
            if excess <= 0:
                # A whole step has this much room. Where that is more than the sums say, the line goes on.
                fits, room, limit = value, -excess, max(limit, points[value] - excess)
                value = within(points)
            else:
                fails, lacking, most = value, excess, value - step
                limit = min(limit, points[value]) - excess
                value = within(points)
        if fits in points and fits < dimension.most:
            fits = self._keeping_attention(found, dimension, points, fits)
        # Where no run confirmed a larger size, the last one that the points name is a guess.
        return Largest(value, confirmed=False) if fits == now < value else Largest(fits, confirmed=True)

    def _keeping_attention(self, found: Found, dimension: Dimension, points: "_Points", fits: int) -> int:
        """A larger size that fits with attention kept in every block, where that has the lower peak; else this one.

        What is kept is small where few blocks hold it: at the end of backward, where gradients are the most.
        """
        variant = Variant.of(found.recipe)
        if variant in self.recomputing:
            return fits
        _, keeping = self._levers(found)
        if keeping is None or (kept := self._peak(found, dimension.shape(fits), keeping)) >= points[fits]:
            self.recomputing.add(variant)
            return fits
        step = dimension.multiple_of
        other = max(points) if max(points) != fits else min(points)
        rise = max(1.0, (points[other] - points[fits]) / (other - fits)) if other != fits else math.inf
        low, high = fits, min(dimension.most, fits + 2 * int((points[fits] - kept) / rise)) + step
        for _ in range(WITH_ATTENTION):
            value = (low + high) // 2 // step * step
            if value - low < max(step, NOT_WORTH_A_RUN * low):
                break
            _, excess = self._peak_and_excess(found, dimension.shape(value), keeping)
            low, high = (value, high) if excess <= 0 else (low, value)
        return low

    def _explore(
        self, found: Found, dimension: Dimension, points: "_Points", within: Callable[["_Points"], int]
    ) -> None:
        """Add points until the size that they name is near to one of them."""
        now = dimension.now
        if len(points) == 1:
            other = 2 * now if 2 * now <= dimension.most else max(1, now // 2)
            points[other] = self._peak(found, dimension.shape(other))
        for _ in range(POINTS):
            value = within(points)
            if value <= FAR * max(points) and min(abs(value - known) / known for known in points) < NEAR:
                break
            value = min(value, JUMP * max(points))
            points[value] = self._peak(found, dimension.shape(value))

    def _guide(self, found: Found, dimension: Dimension, points: "_Points") -> "_Points | None":
        """Points that suggest where to look: those of the variant's other dimension, shifted by what the two need at
        the present size. Only dry runs decide.

        Those of other variants would do as well, but which of them are known would depend on how processes share the
        variants, and so would the sizes.
        """
        if len(points) > 1:
            return None  # another optimizer of the variant has been here
        mine = Variant.of(found.recipe)
        for (variant, name, start), others in self.points.items():
            # As many tokens in one sequence or in several take about the same, unless attention keeps all scores.
            if variant == mine and name != dimension.name and len(others) > 1:
                shift = points[dimension.now] - others[start]
                return _Points({size * dimension.now // start: peak + shift for size, peak in others.items()})
        return None

    def _points(self, found: Found, dimension: Dimension) -> "_Points":
        key = Variant.of(found.recipe), dimension.name, dimension.now
        if key not in self.points:
            now = dimension.now
            self.points[key] = _Points({now: self._peak(found, dimension.shape(now))})
        return self.points[key]

    def _beside(self, found: Found) -> int:
        """Bytes of the states, and those that the allocator adds to the sums."""
        variant, candidate = found.variant, found.candidate
        assert variant is not None, "asked by the caller"
        assert candidate is not None, "a recipe that fits"
        if parse_optimizer(found.recipe.optimizer).kind == OFFLOADED:
            part = variant.whole(candidate.combination, candidate.policies, candidate.joined)
            return max(0, candidate.peak_bytes - part.peak_bytes)
        step = self.search.whole_step(found.recipe)
        return state_bytes(step.update) + step.added_by_allocator

    def _levers(self, found: Found) -> tuple[Levers, Levers | None]:
        """Levers of little memory, and those that keep attention, where that is possible."""
        search = found.variant
        assert search is not None, "asked by the caller"
        if id(search) not in self.levers:  # a search lives as long as its recipes
            frugal = frugal_levers(search)
            self.levers[id(search)] = frugal, keeping_attention(search, frugal)
        return self.levers[id(search)]

    def _peak(self, found: Found, shape: Shape, levers: Levers | None = None) -> int:
        """The peak of forward and backward, with the frugal levers or others."""
        return self._sized(found, shape).whole(*(levers or self._levers(found)[0])).peak_bytes

    def _peak_and_excess(self, found: Found, shape: Shape, levers: Levers | None = None) -> tuple[int, int]:
        """The peak of forward and backward, and the bytes by which the whole step exceeds the budget."""
        search, levers = self._sized(found, shape), levers or self._levers(found)[0]
        step = replace(self.search.whole_step(found.recipe), shared=search)
        return search.whole(*levers).peak_bytes, search.excess(step.candidate(*levers))

    def _sized(self, found: Found, shape: Shape) -> Search:
        """The variant's search with a batch of another shape, whose plain step is not traced."""
        search, batch = found.variant, self.search.asked.batch
        assert search is not None, "asked by the caller"
        if shape == shape_of(batch):
            return search
        request = search.request.but(batch=resized(batch, *shape))
        tracer = replace(search.tracer, request=request)
        return Search(request, search.budget, tracer=tracer, known_paths=search.paths, limit_bytes=search.budget_bytes)
