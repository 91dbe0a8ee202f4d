"""Sizes read off a few dry runs: weights and gradients alone first, then a straight line of activations."""

import pytest

from tightfit.recipes.sizes import _Points


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
