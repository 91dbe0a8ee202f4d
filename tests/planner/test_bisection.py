"""The largest number that fits, from few questions."""

import math

import pytest

from tightfit.planner.search.bisection import (
    DOWN,
    MEASURES,
    NEAR,
    UNBOUNDED,
    Convex,
    Line,
    Measured,
    Range,
    certain_bound,
    corrected_bound,
    halved,
    near_bound,
    rough_bound,
)

CURVES = {
    "a straight line": lambda n: 1000 + 37 * n,
    "a line that is flat at first": lambda n: max(40_000, 37 * n),
    "a square": lambda n: 500 + 3 * n * n,
    "a square root": lambda n: int(900 * math.sqrt(n)),
    "steps": lambda n: 1000 + 4096 * (n // 100),
    "a cliff": lambda n: 10 if n < 777 else 10**9,
}


def bound(curve, limit, top):
    """The answer by looking at every number."""
    return max((n for n in range(1, top + 1) if curve(n) <= limit), default=0)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("limit", [5, 1037, 50_000, 123_456])
def test_the_rough_bound_is_that_of_looking_at_every_number(name, limit):
    asked = []

    def measure(n):
        asked.append(n)
        return CURVES[name](n)

    assert rough_bound(measure, limit, 4000) == bound(CURVES[name], limit, 4000)
    assert len(set(asked)) == len(asked)
    assert len(asked) <= 2 * math.log2(4000)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("guess", [1, 2, 776, 1200, 4000])
def test_the_rough_bound_is_the_same_from_wherever_it_begins(name, guess):
    asked = []

    def measure(n):
        asked.append(n)
        return CURVES[name](n)

    assert rough_bound(measure, 50_000, 4000, guess=guess) == bound(CURVES[name], 50_000, 4000)
    assert len(set(asked)) == len(asked)
    assert len(asked) <= 2 * math.log2(4000) + 2


def test_a_guess_near_the_bound_of_a_straight_line_takes_few_questions():
    asked = []

    def measure(n):
        asked.append(n)
        return 12_345 + 678 * n

    assert rough_bound(measure, 678 * 50_000, 60_000, guess=50_300) == (678 * 50_000 - 12_345) // 678
    assert len(asked) <= 5


def test_a_measure_of_something_alike_says_where_to_look_second():
    asked = []

    def measure(n):
        asked.append(n)
        return 12_345 + 678 * n

    assert rough_bound(measure, 678 * 50_000, 60_000, guess=40_000, beside=(30_000, 12_345 + 678 * 30_000)) == 49_981
    assert asked == [40_000, 49_981, 49_982]


@pytest.mark.parametrize("limit", [50_000, 123_456])
@pytest.mark.parametrize("name", CURVES)
def test_a_bound_that_need_only_be_near_fits_and_takes_fewer_questions(name, limit):
    asked = {0.0: [], 0.05: []}

    def measured(near):
        return rough_bound(lambda n: asked[near].append(n) or CURVES[name](n), limit, 4000, near=near)

    exact = measured(0.0)
    assert exact * 0.95 - 1 <= measured(0.05) <= exact
    assert len(asked[0.05]) <= len(asked[0.0])


def test_a_straight_line_takes_few_questions_wherever_it_ends():
    asked = []

    def measure(n):
        asked.append(n)
        return 12_345 + 678 * n

    assert rough_bound(measure, 678 * 50_000, UNBOUNDED) == (678 * 50_000 - 12_345) // 678
    assert len(asked) <= 8


def test_where_nothing_grows_the_rough_bound_is_the_top():
    assert rough_bound(lambda n: 1, 2, UNBOUNDED) == UNBOUNDED


@pytest.mark.keeps("largest-sequence-batch-width")
@pytest.mark.parametrize("truth", [0, 1, 2, 63, 64, 65, 66, 71, 90, 100])
def test_the_certain_bound_fits_and_the_number_above_it_does_not_however_wrong_the_guess(truth):
    asked = []

    def fits(n):
        asked.append(n)
        return n <= truth

    assert certain_bound(fits, 64, 100) == truth
    assert len(set(asked)) == len(asked)
    assert truth == 0 or truth in asked
    assert truth == 100 or truth + 1 in asked


def test_a_right_guess_takes_two_questions():
    asked = []
    certain_bound(lambda n: not asked.append(n) and n <= 64, 64, 10**6)
    assert asked == [64, 65]


LARGE = {"a straight line": lambda n: 1000 + 37 * n, "a line that is flat at first": lambda n: max(40_000, 37 * n)}


def near(curve, limit, top, *, known=64, refuses=lambda n: False, guide=None):
    """The answer, its line, and the numbers that were measured."""
    asked = []

    def measure(n):
        asked.append(n)
        over = curve(n) - limit
        return Measured(over, over <= 0 and not refuses(n))

    return (*near_bound(measure, known, curve(known) - limit, top, guide), asked)


@pytest.mark.keeps("longest-sequence-largest-batch")
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("limit", [50_000, 123_456, 3_000_000, 10**9])
@pytest.mark.parametrize("top", [500, 200_000])
def test_a_number_near_the_largest_was_measured_and_fits(name, limit, top):
    curve = LARGE[name]
    found, _, asked = near(curve, limit, top)
    exact = max(n for n in range(1, top + 1) if curve(n) <= limit)
    assert curve(found) <= limit
    assert found == 64 or found in asked
    assert exact * (1 - NEAR) - 1 <= found <= exact
    assert len(asked) <= 6
    assert len(set(asked)) == len(asked)


@pytest.mark.keeps("longest-sequence-largest-batch")
def test_where_something_else_is_full_before_the_bytes_it_is_found_from_above():
    found, line, asked = near(LARGE["a straight line"], 3_000_000, 200_000, refuses=lambda n: n > 50_000)
    assert 50_000 * (1 - DOWN) <= found <= 50_000
    assert line.level == line.points[found] < 0
    assert len(asked) <= MEASURES


def test_the_line_of_another_thing_says_where_to_look_and_only_measures_are_believed():
    curve = LARGE["a straight line"]
    _, line, _ = near(curve, 3_000_000, 200_000)
    found, _, asked = near(lambda n: curve(n) + 900_000, 3_000_000, 200_000, guide=moved(line, 900_000))
    assert len(asked) == 1
    assert found == asked[0] == pytest.approx((3_000_000 - 901_000) / 37, rel=0.01)
    found, _, asked = near(curve, 3_000_000, 200_000, guide=moved(line, -(10**9)))
    assert curve(found) <= 3_000_000
    assert found in asked


def moved(line, by):
    return Line({number: over + by for number, over in line.points.items()}, line.level)


def test_where_nothing_larger_fits_it_is_the_number_that_is_known():
    found, _, _ = near(lambda n: 0 if n <= 64 else 10**9, 10, 1000)
    assert found == 64
    found, _, asked = near(LARGE["a straight line"], 10**9, 64)
    assert (found, asked) == (64, [])


@pytest.mark.parametrize("bound", range(13))
def test_halving_finds_the_largest_number_that_fits(bound):
    assert halved(lambda number: number <= bound, 0, 13) == bound
    near = halved(lambda number: number <= 100 + bound, 90, 200, near=0.1)
    assert 0 <= 100 + bound - near <= 2 * 0.1 * (100 + bound)


def test_a_number_that_is_named_was_measured_and_fits():
    taken = {}

    def measure(number):
        taken[number] = excess = 12 * number - 5000 if number > 300 else 10 * number - 4000
        return 10 * number, excess

    points = Convex({100: 1000, 200: 2000})
    found, _ = corrected_bound(measure, points, 4000, Range(100, 10**6), points.largest(4000, Range(100, 10**6)))
    assert taken[found] <= 0
    assert found >= 0.97 * 5000 / 12
