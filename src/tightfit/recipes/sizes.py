"""The longest sequence and the largest batch that a recipe can train within a budget.

The memory of a step is nearly linear in its tokens, once activations outweigh gradients. A dry run of a variant with
the levers of least memory gives that line for all of its optimizers: at each operator, what is held beside weights,
gradients and states grows with the tokens. A dry run at the size that the line names confirms it, or corrects it. The
other dimension has about the same line.
"""

import math
from dataclasses import replace

from tightfit.names import facts_of
from tightfit.planner.levers import Stream
from tightfit.planner.search.bisection import Convex, Lines, Range, corrected_bound
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.search import Search
from tightfit.recipes.batches import Dimension, dimensions_of
from tightfit.recipes.records import LargestSize
from tightfit.recipes.search import Found, RecipeSearch
from tightfit.recipes.whole_step import Levers, SharedStep, WholeStep, with_shape
from tightfit.tracing.record import Category, StepTrace

WITH_ATTENTION = 3  # dry runs that look for a larger size with attention kept
POINTS = 4  # further dry runs of a variant, where a size is read off far from those that were made
JUMP = 8  # times the present size, for the first dry run
WHOLE = 2  # dry runs of the whole step that confirm a size
NEAR = 0.02  # of a size: a larger one is not looked for
# What grows with the tokens of a step; all else is there whatever the batch.
GROWING = (Category.ACTIVATION, Category.INPUT, Category.WORKSPACE)


def with_sizes(search: RecipeSearch, found: Found, *, confirm: bool) -> Found:
    """The outcome of a recipe that fits, with its longest sequence and its largest batch."""
    asked, candidate = search.asked, found.candidate
    dimensions = dimensions_of(asked.model, asked.batch, asked.micro_batches)
    if dimensions is None or candidate is None:
        return found
    recipe, shared = found.recipe, search.shared_step(found.recipe)
    if (stream := candidate.combination.get(Stream)) is not None:
        shared = shared.with_all_streamed(stream)
    if on_host := facts_of(recipe.optimizer).on_host:  # its phase leaves the device's peak as it is
        step = WholeStep(shared.search, None, shared.frees)
        part = shared.search.whole(candidate.combination, candidate.policies, candidate.joined)
        beside = max(0, candidate.peak_bytes - part.peak_bytes)
    else:
        step = search.whole_step(recipe)
        beside = step.beside
    limit = shared.search.budget_bytes - UNSEEN_BYTES - beside
    sizes = [largest_size(shared, step if confirm else None, each, limit) for each in dimensions]
    if on_host and stream is None:
        sizes = [replace(size, confirmed=size.value == each.now) for each, size in zip(dimensions, sizes, strict=True)]
    elif on_host and confirm:
        whole = search.streamed_search(recipe)
        points = [shared.points.get((each.name, each.now), Convex()) for each in dimensions]
        traced = zip(dimensions, sizes, points, strict=True)
        sizes = [_confirmed(whole, shared.levers[0], *each) for each in traced]
    longest, largest = sizes
    return replace(found, outcome=replace(found.outcome, longest_sequence=longest, largest_batch=largest))


def _confirmed(search: Search, levers: Levers, dimension: Dimension, size: LargestSize, points: Convex) -> LargestSize:
    """A size by dry runs of the whole step with these levers, each of which takes as long as three of the plain step.
    `points` are peaks of forward and backward, which grow alike.
    """

    def measure(size: int) -> tuple[int, int]:
        resized = with_shape(search, dimension.shape(size))
        traced = Candidate(levers[0], levers[1], (), resized.whole(*levers))
        return traced.peak_bytes, resized.excess(traced)

    now, among = dimension.now, Range(dimension.now, dimension.most, dimension.multiple_of)
    value, limit = size.value, search.budget_bytes - UNSEEN_BYTES
    for _ in range(WHOLE):
        if value <= now:
            break
        peak, excess = measure(value)
        if excess <= 0:
            return LargestSize(value, confirmed=True)
        value = points.largest(min(limit, peak) - excess, among._replace(most=value - among.step))
    return LargestSize(value, confirmed=value == now)


def largest_size(shared: SharedStep, step: WholeStep | None, dimension: Dimension, limit: int) -> LargestSize:
    """The largest size whose forward and backward take at most `limit`. With a whole step, that confirms it."""
    now, among = dimension.now, Range(dimension.now, dimension.most, dimension.multiple_of)
    if now == dimension.most:
        return LargestSize(now, confirmed=True)  # the size that was asked about was traced
    points = shared.points.setdefault((dimension.name, now), Convex())
    seen = points if points else _guide(shared, dimension) or points
    # A short sequence says little of a long one: chunks of a loss and copies of weights do not grow.
    first = seen.largest(limit, among) if seen else min(JUMP * now, dimension.most)
    if step is None:
        value = _explored(shared, dimension, points, limit, among, first)
        return LargestSize(value, confirmed=value == now)
    # Bytes that the allocator had no room for in the other dimension it has none for here.
    ceiling = min((peak for name, peak in step.refused.items() if name != dimension.name), default=math.inf)
    first = min(first, seen.largest(int(min(limit, ceiling - 1)), among)) if seen else first

    def measure(size: int) -> tuple[int, int]:
        trace, excess = step.part_and_excess(dimension.shape(size), shared.levers[0])
        points[size], points.lines[size] = trace.peak_bytes, lines_by_size(trace, size)
        seen.lines[size] = points.lines[size]
        if excess > 0:
            step.refused[dimension.name] = min(step.refused.get(dimension.name, trace.peak_bytes), trace.peak_bytes)
        return trace.peak_bytes, excess

    fits, value = corrected_bound(measure, seen, limit, among, first, ceiling=ceiling)
    if fits not in points:
        _run(shared, dimension, points, fits)
    if fits < dimension.most and not shared.recomputes:
        fits = _keeping_attention(shared, step, dimension, points, fits)
    # Where no run confirmed a larger size, the last one that the points name is a guess.
    return LargestSize(value, confirmed=False) if fits == now < value else LargestSize(fits, confirmed=True)


def lines_by_size(part: StepTrace, size: int) -> Lines:
    """The peaks of other sizes, by a trace with this one: what it holds beside weights, gradients and states grows."""
    by_category = part.timeline()
    growing = [sum(levels) for levels in zip(*(by_category[category] for category in GROWING), strict=True)]
    return Lines.of((level - grows, grows / size) for level, grows in zip(part.levels, growing, strict=True))


def _run(shared: SharedStep, dimension: Dimension, points: Convex, size: int) -> None:
    """Run a size dry with the levers of little memory."""
    part = shared.part(dimension.shape(size))
    points[size], points.lines[size] = part.peak_bytes, lines_by_size(part, size)


def _keeping_attention(shared: SharedStep, step: WholeStep, dimension: Dimension, points: Convex, fits: int) -> int:
    """A larger size that fits with attention kept in every block, where that has the lower peak; else this one.

    What is kept is small where few blocks hold it: at the end of backward, where gradients are the most.
    """
    _, keeping = shared.levers
    own, room = Convex(), 0

    def measure(size: int) -> tuple[int, int]:
        assert keeping is not None, "attention can be kept"
        trace, excess = step.part_and_excess(dimension.shape(size), keeping)
        own.lines[size] = lines_by_size(trace, size)
        return trace.peak_bytes, excess

    if keeping is not None:
        own[fits], room = measure(fits)
    if keeping is None or own[fits] >= points[fits]:
        shared.recomputes = True
        return fits
    limit, among = own[fits] - room, Range(fits, dimension.most, dimension.multiple_of)
    larger, _ = corrected_bound(measure, own, limit, among, own.largest(limit, among), times=WITH_ATTENTION)
    shared.recomputes = larger == fits  # the other dimension is not tried with it
    return larger


def _explored(shared: SharedStep, dimension: Dimension, points: Convex, limit: int, among: Range, guess: int) -> int:
    """About the largest size within the limit, by few dry runs without an optimizer."""
    for _ in range(POINTS):
        if guess not in points:
            _run(shared, dimension, points, guess)
        further = points.largest(limit, among)
        if points[guess] <= limit and further - guess < max(among.step, NEAR * guess):
            return further if max(points.values()) > limit else guess  # a chord is never too much, a line beyond may be
        guess = further
    return max((int(size) for size in points if points[size] <= limit), default=dimension.now)


def _guide(shared: SharedStep, dimension: Dimension) -> Convex | None:
    """Points that suggest where to look: those of the other dimension. Only dry runs decide.

    Those of other variants would do as well, but which of them are known would depend on how processes share the
    variants, and so would the sizes.
    """
    for (name, start), others in shared.points.items():
        # As many tokens in one sequence or in several take about the same, unless attention keeps all scores.
        if name != dimension.name and others:
            times = dimension.now / start
            lines = {size * times: found.of_numbers_times(times) for size, found in others.lines.items()}
            return Convex({size * times: peak for size, peak in others.items()}, lines)
    return None
