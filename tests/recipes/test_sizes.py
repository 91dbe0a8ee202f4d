"""Sizes read off a few dry runs: weights and gradients alone first, then a straight line of activations."""

from types import SimpleNamespace

import pytest

from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.recipes.sizes import CORRECTIONS, Dimension, Sizes, _Points


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
    """`excess` says by how many bytes a whole step of a size exceeds the budget; tensors alone are a straight line."""

    def __init__(self, excess):
        super().__init__(search=None)
        self.excess, self.ran = excess, []

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
        return size - 40, self.excess(size)  # what was run takes a little less than the line

    def largest(self, limit):
        """The largest size where the sums of tensors would have this limit."""
        recipe = SimpleNamespace(optimizer="adamw")
        found = SimpleNamespace(recipe=recipe, variant=SimpleNamespace(budget_bytes=limit + UNSEEN_BYTES))
        largest = self._largest(found, Dimension("length", 1024, 1, 32768, lambda n: (1, n)), confirm=True)
        assert largest.confirmed
        assert len(self.ran) <= CORRECTIONS
        return largest.value


def test_between_a_size_that_fits_and_one_that_does_not_more_are_tried():
    """After a failure, what the line names lies far below what fits: the allocator cannot use one block."""
    sizes = Stepped(lambda size: size + (2000 if size > 8000 else 0) - 8500)
    assert 0.97 * 8000 <= sizes.largest(8500) <= 8000
    assert sizes.ran[1] < 0.9 * 8000  # what the line names after the failure


def test_where_a_size_that_fits_is_far_from_one_that_does_not_the_middle_is_tried_whatever_the_bytes_say():
    sizes = Stepped(lambda size: -10 if size <= 7000 else 5000)
    assert 0.9 * 7000 <= sizes.largest(9000) <= 7000


def test_a_size_with_more_room_than_the_sums_say_is_not_the_last():
    sizes = Stepped(lambda size: size - 8000)
    assert 0.98 * 8000 <= sizes.largest(5000) <= 8000
