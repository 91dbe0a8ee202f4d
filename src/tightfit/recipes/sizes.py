"""The longest sequence and the largest batch that a recipe can train within a budget.

The memory of a step is nearly linear in its tokens, once activations outweigh gradients. A few dry runs of a variant
with the levers of least memory give that line for all of its optimizers. The other dimension needs only one run more:
it has about the same line at another height. A dry run at the size that the line names confirms it, or corrects it.
"""

import math
from dataclasses import dataclass, field, replace

from tightfit.names import OFFLOADED, parse_optimizer
from tightfit.planner.search.bisection import NOT_WORTH_A_RUN, Convex, Range, corrected_bound, halved
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.search import Search
from tightfit.recipes.batches import Dimension, Shape, dimensions_of, resized, shape_of
from tightfit.recipes.records import LargestSize
from tightfit.recipes.search import Found, RecipeSearch
from tightfit.recipes.variants import Variant
from tightfit.recipes.whole_step import Levers, frugal_levers, keeping_attention
from tightfit.tracing.joined import state_bytes

WITH_ATTENTION = 3  # dry runs that look for a larger size with attention kept
POINTS = 4  # further dry runs of a variant, where a size is read off far from those that were made
FAR = 2  # times the largest size that was run dry, up to which a straight line is believed
NEAR = 0.5  # of a size: how near to a point a size is read off between points
JUMP = 8  # times the largest size that was run dry, for the next


@dataclass
class Sizes:
    """Mutable: the points of the variants, which their optimizers share, by the dimension's name and present size."""

    search: RecipeSearch
    points: dict[tuple[Variant, str, int], Convex] = field(default_factory=dict)
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

    def _largest(self, found: Found, dimension: Dimension, confirm: bool) -> LargestSize:
        variant, now, step = found.variant, dimension.now, dimension.multiple_of
        assert variant is not None, "asked by the caller"
        limit = variant.budget_bytes - UNSEEN_BYTES - self._beside(found)
        points = self._points(found, dimension)
        among = Range(now, dimension.most, step)
        guide = self._guide(found, dimension, points)
        if not (confirm and parse_optimizer(found.recipe.optimizer).kind != OFFLOADED):
            if guide is not None and (value := guide.largest(limit, among)) not in points:
                points[value] = self._peak(found, dimension.shape(value))
            self._explore(found, dimension, points, limit, among)
            value = points.largest(limit, among)
            return LargestSize(value, confirmed=value == now)  # the size that was asked about was traced
        if guide is None:
            self._explore(found, dimension, points, limit, among)
        fits, value = corrected_bound(
            lambda size: self._peak_and_excess(found, dimension.shape(size)),
            points,
            limit,
            among,
            (points if guide is None else guide).largest(limit, among),
        )
        if fits in points and fits < dimension.most:
            fits = self._keeping_attention(found, dimension, points, fits)
        # Where no run confirmed a larger size, the last one that the points name is a guess.
        return LargestSize(value, confirmed=False) if fits == now < value else LargestSize(fits, confirmed=True)

    def _keeping_attention(self, found: Found, dimension: Dimension, points: Convex, fits: int) -> int:
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
        most = min(dimension.most, fits + 2 * int((points[fits] - kept) / rise)) + step

        def fits_keeping(value: int) -> bool:
            return self._peak_and_excess(found, dimension.shape(value), keeping)[1] <= 0

        return halved(fits_keeping, fits, most, step=step, near=NOT_WORTH_A_RUN, times=WITH_ATTENTION)

    def _explore(self, found: Found, dimension: Dimension, points: Convex, limit: int, among: Range) -> None:
        """Add points until the size that they name is near to one of them."""
        now = dimension.now
        if len(points) == 1:
            other = 2 * now if 2 * now <= dimension.most else max(1, now // 2)
            points[other] = self._peak(found, dimension.shape(other))
        for _ in range(POINTS):
            value = points.largest(limit, among)
            if value <= FAR * max(points) and min(abs(value - known) / known for known in points) < NEAR:
                break
            value = min(value, JUMP * max(points))
            points[value] = self._peak(found, dimension.shape(value))

    def _guide(self, found: Found, dimension: Dimension, points: Convex) -> Convex | None:
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
                return Convex({size * dimension.now // start: peak + shift for size, peak in others.items()})
        return None

    def _points(self, found: Found, dimension: Dimension) -> Convex:
        key = Variant.of(found.recipe), dimension.name, dimension.now
        if key not in self.points:
            now = dimension.now
            self.points[key] = Convex({now: self._peak(found, dimension.shape(now))})
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
