"""The longest sequence and the largest batch that a recipe can train within a budget.

The memory of a step is nearly linear in its tokens, once activations outweigh gradients. A few dry runs of a variant
with the levers of least memory give that line for all of its optimizers. The other dimension needs only one run more:
it has about the same line at another height. A dry run at the size that the line names confirms it, or corrects it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tightfit.names import OFFLOADED, parse_optimizer
from tightfit.planner.levers import Stream
from tightfit.planner.search.bisection import NOT_WORTH_A_RUN, Convex, Range, corrected_bound, halved
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.recipes.batches import Dimension, Shape, dimensions_of
from tightfit.recipes.records import LargestSize, Recipe
from tightfit.recipes.search import Found, RecipeSearch
from tightfit.recipes.whole_step import SharedStep, WholeStep, frugal_levers, with_shape
from tightfit.tracing.joined import state_bytes

WITH_ATTENTION = 3  # dry runs that look for a larger size with attention kept
POINTS = 4  # further dry runs of a variant, where a size is read off far from those that were made
FAR = 2  # times the largest size that was run dry, up to which a straight line is believed
NEAR = 0.5  # of a size: how near to a point a size is read off between points
JUMP = 8  # times the largest size that was run dry, for the next


def with_sizes(search: RecipeSearch, found: Found, *, confirm: bool) -> Found:
    """The outcome of a recipe that fits, with its longest sequence and its largest batch."""
    asked, candidate = search.asked, found.candidate
    dimensions = dimensions_of(asked.model, asked.batch, asked.micro_batches)
    if dimensions is None or candidate is None:
        return found
    if found.outcome.streamed_blocks:  # the traces that recipes share hold all weights on the device
        longest, largest = _streamed_sizes(search, found.recipe, dimensions, confirm=confirm)
        return replace(found, outcome=replace(found.outcome, longest_sequence=longest, largest_batch=largest))
    shared, step = search.shared_step(found.recipe), None
    if parse_optimizer(found.recipe.optimizer).kind == OFFLOADED:  # traced whole, so it is not joined to confirm a size
        part = shared.search.whole(candidate.combination, candidate.policies, candidate.joined)
        beside = max(0, candidate.peak_bytes - part.peak_bytes)
    else:
        step = search.whole_step(found.recipe)
        beside = state_bytes(step.update) + step.added_by_allocator
    limit = shared.search.budget_bytes - UNSEEN_BYTES - beside
    longest, largest = (largest_size(shared, step if confirm else None, each, limit) for each in dimensions)
    return replace(found, outcome=replace(found.outcome, longest_sequence=longest, largest_batch=largest))


def _streamed_sizes(
    search: RecipeSearch, recipe: Recipe, dimensions: Sequence[Dimension], *, confirm: bool
) -> list[LargestSize]:
    """The largest sizes with all blocks streamed and at their least: two dry runs of the whole step, and those that
    confirm a size. The second dimension takes the line of the first, shifted by nothing: as many tokens take about as
    much.
    """
    whole = search.streamed_search(recipe)
    combination, policies = frugal_levers(whole)
    combination = combination.with_lever(Stream.settings(whole.step())[-1])
    limit, found, line = whole.budget_bytes - UNSEEN_BYTES, [], None

    def peak_and_excess(shape: Shape) -> tuple[int, int]:
        resized = with_shape(whole, shape)
        traced = Candidate(combination, policies, (), resized.whole(combination, policies))
        return traced.peak_bytes, resized.excess(traced)

    for each in dimensions:
        now, among = each.now, Range(each.now, each.most, each.multiple_of)
        other = 2 * now if 2 * now <= each.most else max(1, now // 2)
        measure = partial(lambda dimension, size: peak_and_excess(dimension.shape(size)), each)
        points = Convex({size: measure(size)[0] for size in (now, *(() if line else (other,)))})
        guide = points if line is None else Convex({size * now // line[0]: peak for size, peak in line[1].items()})
        guess, fits = guide.largest(limit, among), now
        if confirm:
            fits, guess = corrected_bound(measure, points, limit, among, guess)
        found.append(LargestSize(fits, confirmed=True) if fits > now or guess == now else LargestSize(guess))
        line = line or (now, points)
    return found


def largest_size(shared: SharedStep, step: WholeStep | None, dimension: Dimension, limit: int) -> LargestSize:
    """The largest size whose forward and backward take at most `limit`. With a whole step, that confirms it."""
    now = dimension.now
    if (dimension.name, now) not in shared.points:
        shared.points[dimension.name, now] = Convex({now: shared.peak(dimension.shape(now))})
    points = shared.points[dimension.name, now]
    among = Range(now, dimension.most, dimension.multiple_of)
    guide = _guide(shared, dimension, points)
    if step is None:
        if guide is not None and (value := guide.largest(limit, among)) not in points:
            points[value] = shared.peak(dimension.shape(value))
        _explore(shared, dimension, points, limit, among)
        value = points.largest(limit, among)
        return LargestSize(value, confirmed=value == now)  # the size that was asked about was traced
    if guide is None:
        _explore(shared, dimension, points, limit, among)
    fits, value = corrected_bound(
        lambda size: step.peak_and_excess(dimension.shape(size), shared.levers[0]),
        points,
        limit,
        among,
        (points if guide is None else guide).largest(limit, among),
    )
    if fits in points and fits < dimension.most and not shared.recomputes:
        fits = _keeping_attention(shared, step, dimension, points, fits)
    # Where no run confirmed a larger size, the last one that the points name is a guess.
    return LargestSize(value, confirmed=False) if fits == now < value else LargestSize(fits, confirmed=True)


def _keeping_attention(shared: SharedStep, step: WholeStep, dimension: Dimension, points: Convex, fits: int) -> int:
    """A larger size that fits with attention kept in every block, where that has the lower peak; else this one.

    What is kept is small where few blocks hold it: at the end of backward, where gradients are the most.
    """
    _, keeping = shared.levers
    if keeping is None or (kept := shared.peak(dimension.shape(fits), keeping)) >= points[fits]:
        shared.recomputes = True
        return fits
    other = max(points) if max(points) != fits else min(points)
    rise = max(1.0, (points[other] - points[fits]) / (other - fits)) if other != fits else math.inf
    multiple = dimension.multiple_of
    most = min(dimension.most, fits + 2 * int((points[fits] - kept) / rise)) + multiple

    def fits_keeping(value: int) -> bool:
        return step.peak_and_excess(dimension.shape(value), keeping)[1] <= 0

    return halved(fits_keeping, fits, most, step=multiple, near=NOT_WORTH_A_RUN, times=WITH_ATTENTION)


def _explore(shared: SharedStep, dimension: Dimension, points: Convex, limit: int, among: Range) -> None:
    """Add points until the size that they name is near to one of them."""
    now = dimension.now
    if len(points) == 1:
        other = 2 * now if 2 * now <= dimension.most else max(1, now // 2)
        points[other] = shared.peak(dimension.shape(other))
    for _ in range(POINTS):
        value = points.largest(limit, among)
        if value <= FAR * max(points) and min(abs(value - known) / known for known in points) < NEAR:
            break
        value = min(value, JUMP * max(points))
        points[value] = shared.peak(dimension.shape(value))


def _guide(shared: SharedStep, dimension: Dimension, points: Convex) -> Convex | None:
    """Points that suggest where to look: those of the other dimension, shifted by what the two need at the present
    size. Only dry runs decide.

    Those of other variants would do as well, but which of them are known would depend on how processes share the
    variants, and so would the sizes.
    """
    if len(points) > 1:
        return None  # another optimizer of the variant has been here
    for (name, start), others in shared.points.items():
        # As many tokens in one sequence or in several take about the same, unless attention keeps all scores.
        if name != dimension.name and len(others) > 1:
            shift = points[dimension.now] - others[start]
            return Convex({size * dimension.now // start: peak + shift for size, peak in others.items()})
    return None
