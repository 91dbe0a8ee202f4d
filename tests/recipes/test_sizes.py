"""Sizes read off a few dry runs: weights and gradients alone first, then a straight line of activations."""

from types import SimpleNamespace

import pytest

from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.recipes.sizes import CORRECTIONS, Sizes, _Dimension, _Points


def convex(size):
    return max(1000, 10 * size)


def test_between_points_the_chord_is_never_too_much_and_beyond_them_the_last_slope_goes_on():
    points = _Points({n: convex(n) for n in (10, 20, 100, 200)})
    for limit in range(1000, 2001, 50):
        value = points.largest(limit, 10**6)
        assert convex(value) <= limit
    assert points.largest(5000, 10**6) == 500
    assert points.largest(5000, 300) == 300
    assert points.largest(999, 10**6) == 10, "not even the smallest fits"


def test_a_flat_start_says_nothing_about_what_comes_after():
    points = _Points({n: convex(n) for n in (10, 20)})
    assert points.largest(1200, 640) == 640
    points[160] = convex(160)
    assert convex(points.largest(1200, 640)) <= 1200
    points[points.largest(1200, 640)] = convex(points.largest(1200, 640))
    assert points.largest(1200, 640) == pytest.approx(120, rel=0.25)


class Stepped(Sizes):
    """Bytes that are a straight line, until the allocator cannot use a block of 2,000 from a size of 8,001 on."""

    def __init__(self):
        super().__init__(search=None)
        self.ran = []

    def _points(self, found, dimension):
        return _Points({dimension.now: dimension.now, 2 * dimension.now: 2 * dimension.now})

    def _guide(self, found, dimension, points):
        return None

    def _explore(self, found, dimension, points, within):
        pass

    def _beside(self, found):
        return 0

    def _peak_and_excess(self, found, shape):
        size = shape[1]
        self.ran.append(size)
        return size - 40, size + (2000 if size > 8000 else 0) - 8500  # what was run takes a little less than the line


def test_between_a_size_that_fits_and_one_that_does_not_more_are_tried():
    """After a failure, what the line names lies far below what fits."""
    recipe = SimpleNamespace(optimizer="adamw")
    found = SimpleNamespace(recipe=recipe, variant=SimpleNamespace(budget_bytes=8500 + UNSEEN_BYTES))
    sizes = Stepped()

    largest = sizes._largest(found, _Dimension("length", 1024, 1, 32768, lambda n: (1, n)), confirm=True)

    assert largest.confirmed
    assert 0.98 * 8000 <= largest.value <= 8000
    assert len(sizes.ran) <= CORRECTIONS
    assert sizes.ran[1] < 0.9 * 8000  # what the line names after the failure
