"""Which outputs of a block are worth keeping, against enumeration of all keep sets."""

import math
import random
from itertools import pairwise

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.planner.blocks.frontier import BlockOperator, frontier, replay_cost

NANOSECOND = 1e-9
EVERYTHING = 10_000  # more sets than any frontier here has


@st.composite
def small_blocks(draw) -> list[BlockOperator]:
    sizes = st.integers(0, 6) if draw(st.booleans()) else st.integers(0, 10**12)
    operations = []
    for place in range(draw(st.integers(0, 10))):
        inputs = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
        seconds = draw(st.integers(0, 6) | st.integers(0, 10**7)) * NANOSECOND
        pinned = draw(st.integers(0, 5)) == 0
        operations.append(BlockOperator(seconds, draw(sizes), draw(st.booleans()), tuple(sorted(inputs)), pinned))
    return operations


def every_keep_set(operations: list[BlockOperator]) -> set[tuple[int, int]]:
    """(bytes, nanoseconds) of all keep sets: needs spread from replayed operations to their inputs, step by step."""
    count = len(operations)
    kept = (np.arange(2**count)[:, None] >> np.arange(count) & 1).astype(bool)
    kept |= np.array([o.pinned for o in operations], dtype=bool)
    reads = np.zeros((count, count), dtype=bool)
    for place, operation in enumerate(operations):
        reads[place, list(operation.inputs)] = True
    needed = np.broadcast_to(np.array([o.saved for o in operations], dtype=bool), kept.shape)
    for _ in range(count):
        needed = needed | ((needed & ~kept) @ reads)
    sizes = np.array([o.bytes for o in operations], dtype=np.int64)
    nanoseconds = np.array([round(o.seconds * 1e9) for o in operations], dtype=np.int64)
    costs = np.stack([(needed & kept) @ sizes, (needed & ~kept) @ nanoseconds], axis=1)
    return {(size, time) for size, time in costs.tolist()}


def lower_hull(points: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Corners of the lower convex hull, from the fewest nanoseconds to the fewest bytes."""
    hull: list[tuple[int, int]] = []
    for size, time in sorted(points):
        if hull and time >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (s0, t0), (s1, t1) = hull[-2:]
            if (t1 - t0) * (size - s0) < (time - t0) * (s1 - s0):
                break
            hull.pop()
        hull.append((size, time))
    return hull[::-1]


def cost(keep_set) -> tuple[int, int]:
    return keep_set.kept_bytes, round(keep_set.replay_seconds * 1e9)


@settings(deadline=None)
@given(small_blocks())
def test_every_corner_of_the_hull_is_found(operations):
    found = [cost(keep_set) for keep_set in frontier(operations, limit=EVERYTHING)]
    hull = lower_hull(every_keep_set(operations))
    assert set(hull) <= set(found)
    assert (found[0], found[-1]) == (hull[0], hull[-1])


@settings(deadline=None)
@given(small_blocks(), st.integers(2, 5))
def test_sets_trade_bytes_for_seconds_one_by_one_and_keep_both_ends(operations, limit):
    sets = frontier(operations, limit=limit)
    hull = lower_hull(every_keep_set(operations))
    assert len(sets) <= limit
    assert (cost(sets[0]), cost(sets[-1])) == (hull[0], hull[-1])
    for faster, smaller in pairwise(sets):
        assert smaller.kept_bytes < faster.kept_bytes
        assert smaller.replay_seconds > faster.replay_seconds


@settings(deadline=None)
@given(small_blocks())
def test_stated_cost_is_that_of_the_kept_outputs(operations):
    for keep_set in frontier(operations):
        kept_bytes, seconds, replayed = replay_cost(operations, keep_set.kept)
        assert (keep_set.kept_bytes, keep_set.replay_seconds) == (kept_bytes, seconds)
        assert keep_set.kept.isdisjoint(replayed)
        assert all(keep_set.kept >= {place} for place, operation in enumerate(operations) if operation.pinned)


def test_first_set_keeps_what_autograd_saves_and_replays_nothing():
    operations = [
        BlockOperator(1.0, 10, True, ()),
        BlockOperator(1.0, 7, False, (0,)),
        BlockOperator(1.0, 20, True, (1,)),
    ]
    first = frontier(operations)[0]
    assert (first.kept, first.kept_bytes, first.replay_seconds) == (frozenset({0, 2}), 30, 0.0)


def test_last_set_replays_everything_that_backward_needs_and_nothing_else():
    needed, unneeded = BlockOperator(1.0, 10, True, ()), BlockOperator(5.0, 10, False, (0,))
    last = frontier([needed, unneeded])[-1]
    assert (last.kept, last.kept_bytes, last.replay_seconds) == (frozenset(), 0, 1.0)


def test_an_input_that_is_not_saved_is_kept_where_it_is_the_cheaper_road():
    """A small product feeds a large activation: keeping the small one replaces the large one at little time."""
    operations = [
        BlockOperator(100.0, 4, False, ()),
        BlockOperator(1.0, 16, True, (0,)),
        BlockOperator(1.0, 16, True, (0,)),
    ]
    assert [(sorted(s.kept), s.kept_bytes, s.replay_seconds) for s in frontier(operations, limit=3)] == [
        ([1, 2], 32, 0.0),
        ([0], 4, 2.0),
        ([], 0, 102.0),
    ]


def test_an_operation_replayed_for_two_readers_is_paid_once():
    operations = [
        BlockOperator(3.0, 8, False, ()),
        BlockOperator(1.0, 8, True, (0,)),
        BlockOperator(1.0, 8, True, (0,)),
    ]
    assert replay_cost(operations, frozenset()) == (0, 5.0, (0, 1, 2))


def test_kept_output_that_nothing_reads_costs_nothing():
    operations = [BlockOperator(1.0, 8, False, ()), BlockOperator(1.0, 8, True, (0,))]
    assert replay_cost(operations, frozenset({0, 1})) == (8, 0.0, ())


def test_pinned_operation_is_never_replayed():
    operations = [BlockOperator(1.0, 8, False, (), pinned=True), BlockOperator(1.0, 16, True, (0,))]
    last = frontier(operations)[-1]
    assert (last.kept, last.kept_bytes) == (frozenset({0}), 8)
    assert replay_cost(operations, frozenset()) == (8, 1.0, (1,))


def test_output_that_exists_anyway_is_kept_rather_than_replayed():
    operations = [BlockOperator(1.0, 0, True, ()), BlockOperator(1.0, 8, True, (0,))]
    assert [s.replay_seconds for s in frontier(operations)] == [0.0, 1.0]


def test_gap_between_corners_is_filled_where_seconds_are_proportional_to_bytes():
    operations = [BlockOperator(float(size), size, True, ()) for size in (3, 5, 2, 7, 4, 6)]
    sets = frontier(operations, limit=6)
    assert len(sets) == 6
    assert all(s.kept_bytes + s.replay_seconds == 27 for s in sets)
    assert max(left.kept_bytes - right.kept_bytes for left, right in pairwise(sets)) <= 10


def test_a_block_that_saves_nothing_has_one_set():
    assert [cost(s) for s in frontier([BlockOperator(1.0, 8, False, ())])] == [(0, 0)]
    assert [cost(s) for s in frontier([])] == [(0, 0)]


def random_block(rng: random.Random, count: int) -> list[BlockOperator]:
    return [
        BlockOperator(
            seconds=rng.randint(1, 5000) * 1e-6,
            bytes=rng.randint(0, 10**8),
            saved=rng.random() < 0.5,
            inputs=tuple(sorted({rng.randrange(max(0, place - 8), place) for _ in range(min(place, 2))})),
        )
        for place in range(count)
    ]


def least_cost_by_linear_programme(operations: list[BlockOperator], bytes_per_second: float) -> float:
    """Least bytes_per_second * seconds + bytes, in GB: variables are available (column 2i) and replayed (2i + 1)."""
    model = highspy.Highs()
    model.silent()
    for place, operation in enumerate(operations):
        model.addVar(1.0 if operation.saved else 0.0, 1.0)
        model.addVar(0.0, 1.0)
        model.changeColCost(2 * place, operation.bytes / 1e9)
        model.changeColCost(2 * place + 1, (bytes_per_second * operation.seconds - operation.bytes) / 1e9)
        for source in (place, *operation.inputs):
            columns = np.array([2 * source, 2 * place + 1], dtype=np.int32)
            model.addRow(0.0, math.inf, 2, columns, np.array([1.0, -1.0]))
    model.run()
    return model.getObjectiveValue()


@pytest.mark.parametrize("seed", range(3))
def test_frontier_of_a_large_block_is_optimal_at_every_exchange_rate(seed):
    operations = random_block(random.Random(seed), 100)
    sets = frontier(operations, limit=EVERYTHING)
    for bytes_per_second in (1e9, 1e10, 3e10, 1e11, 1e12):
        cheapest = min(s.kept_bytes + bytes_per_second * s.replay_seconds for s in sets) / 1e9
        assert cheapest == pytest.approx(least_cost_by_linear_programme(operations, bytes_per_second), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_frontier_of_a_large_block_is_thinned_to_even_steps(seed):
    operations = random_block(random.Random(seed), 100)
    every, some = frontier(operations, limit=EVERYTHING), frontier(operations, limit=8)
    assert len(every) > 20
    assert 6 <= len(some) <= 8
    all_bytes, all_seconds = every[0].kept_bytes, every[-1].replay_seconds
    for left, right in pairwise(some):
        bytes_apart = (left.kept_bytes - right.kept_bytes) / all_bytes
        seconds_apart = (right.replay_seconds - left.replay_seconds) / all_seconds
        assert bytes_apart + seconds_apart < 2 * 2 / 7
