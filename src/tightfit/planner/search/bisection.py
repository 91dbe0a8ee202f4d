"""Finds the largest whole number that fits, with few evaluations. No torch here.

Two functions are available: a cheap, approximate measure and an expensive, exact test. `rough_bound` uses the measure.
It follows the secant of the last two values, because the memory of a step is nearly linear in its batch and its
length, and bisects where the secant converges too slowly. `certain_bound` starts from that number and uses the test,
mostly twice: for the number and for the one above it. Where the measure is as expensive as it is exact, `near_bound`
finds a number that fits and is nearly the largest. Where a cheap measure shows the shape and an expensive one decides,
`corrected_bound` follows the first and learns from the second.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GROWTH = 16  # a guess is at most this many times the largest number known to fit
UNBRACKETED = 3  # guesses that may all be too large before bisection replaces the secant
UNBOUNDED = 2**30  # a number that does not fit anything whose memory grows with it
JUMP = 8  # times the largest number known to fit, for the first guess where nothing says more
NEAR = 0.03  # of a number that fits: a larger one is not looked for
DOWN = 0.06  # of a number that is refused though its bytes fit: the next guess is so much smaller
BESIDE = 0.2  # of a number: how far away another one is that says how the measure rises
MEASURES = 10  # of `near_bound`
CORRECTIONS = 6  # measures of `corrected_bound`
NOT_WORTH_A_RUN = 0.02  # of a number that fits: a larger one is not looked for by `corrected_bound`
WIDE = 0.1  # of a number that fits: how far away one that does not is worth another measure, whatever the bytes say


def rough_bound(
    measure: Callable[[int], int],
    limit: int,
    top: int,
    guess: int = 1,
    *,
    beside: tuple[int, int] | None = None,
    near: float = 0.0,
) -> int:
    """The largest number from 1 to `top` whose measure is at most `limit`; 0 if there is none.

    The measure is assumed never to fall. The search starts at `guess`. `beside` is a number and about its measure,
    which only say where to look second. `near` ends the search at a number that fits where one larger by this share
    does not.
    """
    answers: list[tuple[int, int]] = [] if beside is None or beside[0] == guess else [beside]
    begun = len(answers)
    low, high, span = 0, top + 1, top + 1
    while high - low > max(1, int(near * low)):
        answers.append((guess, measure(guess)))
        low, high = (guess, high) if answers[-1][1] <= limit else (low, guess)
        is_bracketed = high <= top and (low > 0 or len(answers) - begun > UNBRACKETED)
        too_slow = is_bracketed and (high - low) * 2 > span
        guess = (low + high) // 2 if too_slow else _secant(answers[-2:], limit, high - 1)
        span = high - low
        guess = max(low + 1, min(guess, high - 1, low * GROWTH if low else high))
    return low


def _secant(answers: list[tuple[int, int]], limit: int, most: int) -> int:
    """The number at which the straight line through two answers meets the limit; `most` if it never does."""
    if len(answers) < 2:
        return answers[0][0] + 1
    (x, y), (other_x, other_y) = answers
    rise = (other_y - y) / (other_x - x)
    return most if rise <= 0 else min(most, int(other_x + (limit - other_y) / rise))


def certain_bound(fits: Callable[[int], bool], guess: int, top: int) -> int:
    """The number from 1 to `top` that fits while the next one does not; 0 if 1 does not fit. Starts at `guess`."""
    low, high, stride = 0, top + 1, 1  # low fits, if it is not 0; high does not, if it is not top + 1
    number = min(max(guess, 1), top)
    while high - low > 1:
        low, high = (number, high) if fits(number) else (low, number)
        if low and high <= top:
            number = (low + high) // 2
        else:
            number = min(low + stride, top) if low else max(high - stride, 1)
            stride *= 2
    return low


@dataclass(frozen=True)
class Measured:
    """Bytes over a limit, below zero what is free, and whether it fits: something else may be full before."""

    over: int
    fits: bool


@dataclass(frozen=True)
class Line:
    """Bytes over a limit by number, for what grows nearly in a line, and the bytes up to which it fits."""

    points: Mapping[Any, int] = field(default_factory=dict)
    level: int = 0

    @property
    def rise(self) -> float:
        """The slope between the point nearest to the level and the next one that is not beside it; 0 without such."""
        near, *others = sorted(self.points, key=lambda number: abs(self.points[number] - self.level)) or [0]
        apart = [other for other in others if abs(other - near) > BESIDE * near]
        return (self.points[apart[0]] - self.points[near]) / (apart[0] - near) if apart else 0.0

    def number(self, rise: float, top: int) -> int:
        """Where the line of this slope through the point nearest to the level meets it; `top` if it never does."""
        near = min(self.points, key=lambda number: abs(self.points[number] - self.level))
        return top if rise <= 0 else min(top, int(near + (self.level - self.points[near]) / rise))


def near_bound(
    measure: Callable[[int], Measured], known: int, known_over: int, top: int, guide: Line | None = None
) -> tuple[int, Line]:
    """About the largest number up to `top` that fits, and the line of all measures that were taken.

    `known` fits, with at most `known_over`. A larger number is returned only if it was measured. `guide` is the line
    of something that grows alike.
    """
    guide = guide or Line()
    taken: dict[int, int] = {}
    low, high, level = known, top + 1, guide.level
    refused = 0  # times that something else was full
    for _ in range(MEASURES):
        near = max(1, int(NEAR * low))
        if low == top or high - low <= max(near, DOWN * low if refused else 0):
            break
        if refused:  # what refuses follows no line
            guess = max((low + high) // 2, int(high * (1 - DOWN * 2 ** (refused - 1))))
        else:
            guess = _guessed(Line(taken, level), Line({known: known_over, **taken}, level), guide, low, high, top)
        if guess - low < near and guess != top:
            break
        guess = max(low + 1, min(guess, high - 1))
        found = measure(guess)
        taken[guess] = found.over
        low, high = (guess, high) if found.fits else (low, guess)
        if found.fits:
            level = found.over if refused else level
        elif found.over <= level:
            refused += 1
    return low, Line(taken, level)


def _guessed(taken: Line, with_known: Line, guide: Line, low: int, high: int, top: int) -> int:
    """The next number to measure."""
    if not taken.points:
        return guide.number(guide.rise, top) if guide.rise > 0 else min(top, low * JUMP)
    points = with_known.points
    if low in points and high in points:
        chord = Line({low: points[low]}, taken.level)
        return chord.number((points[high] - points[low]) / (high - low), top)
    rise = taken.rise or guide.rise or with_known.rise
    if rise <= 0:
        return min(low * JUMP, top)
    return min(taken.number(rise, top), low * GROWTH)


def halved(
    fits: Callable[[int], bool], low: int, high: int, *, step: int = 1, near: float = 0.0, times: int | None = None
) -> int:
    """The largest number that fits, from `low`, which does, to `high`, which does not, by halving.

    Of multiples of `step` it is about the largest. It ends where a larger one would be nearer than the share `near` of
    what fits, or after so many times.
    """
    for _ in range(high - low if times is None else times):
        middle = (low + high) // 2 // step * step
        if middle - low < max(step, near * low):
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Range(NamedTuple):
    """The numbers to choose from: multiples of `step`, from one that fits."""

    known: int
    most: int
    step: int = 1


@dataclass(frozen=True)
class Lines:
    """Bytes by number as the largest of several lines: at each moment of a step a constant part and one that grows.

    `parts` are the constant bytes and the rise of each line, none of which is below another one everywhere.
    """

    parts: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, moments: Iterable[tuple[float, float]]) -> "Lines":
        """The lines of all moments that are the highest somewhere above 0."""
        kept: list[tuple[float, float]] = []
        for constant, rise in sorted(set(moments), key=lambda moment: (-moment[1], -moment[0])):
            if not kept or constant > kept[-1][0]:
                kept.append((constant, rise))
        return cls(tuple(kept))

    def largest(self, limit: int) -> float:
        """The largest number within the limit; infinite if nothing grows."""
        return min(((limit - constant) / rise for constant, rise in self.parts if rise > 0), default=math.inf)

    def of_numbers_times(self, times: float) -> "Lines":
        """The lines of numbers that are so many times as large."""
        return Lines(tuple((constant, rise / times) for constant, rise in self.parts))


class Convex(dict[float, int]):
    """Bytes by number, where they are convex: constant parts alone first, then a straight line.

    So what lies between two points is at most the chord, and what is read off it fits. `lines` are what the dry run at
    a point says of other numbers, where it was kept: while there is no other point, nothing else says anything.
    """

    def __init__(self, points: Mapping[Any, int] | None = None, lines: Mapping[Any, Lines] | None = None):
        super().__init__(points or {})
        self.lines: dict[float, Lines] = dict(lines or {})

    def largest(self, limit: int, among: Range) -> int:
        """The largest number within the limit, between the points or beyond the last two."""
        known, most, step = among
        return max(known, min(self._largest(limit, most) // step * step, most))

    def _largest(self, limit: int, most: int) -> int:
        low = max((value for value in self if self[value] <= limit), default=None)
        high = min((value for value in self if self[value] > limit), default=None)
        most = most if high is None else min(most, math.ceil(high) - 1)
        if len(self) == 1 and self.lines:
            (only,) = self.lines.values()
            return int(min(only.largest(limit), most))
        if low is None and not self.lines:
            return int(min(self))
        # Between two points, or beyond the first or the last two.
        near = sorted(self)[:2] if low is None else sorted(self)[-2:] if high is None else [low, high]
        slope = (self[near[-1]] - self[near[0]]) / (near[-1] - near[0]) if len(near) > 1 else 0.0
        return int(min(near[0] + (limit - self[near[0]]) / slope, most)) if slope > 0 else most


def corrected_bound(
    measure: Callable[[int], tuple[int, int]],
    points: Convex,
    limit: int,
    among: Range,
    guess: int,
    *,
    ceiling: float = math.inf,
    times: int = CORRECTIONS,
) -> tuple[int, int]:
    """The largest number found that fits, and the next one that the points name. The points get what was measured.

    `measure` returns what the points hold, and by how much the number fits or not, which is what counts. No number with
    `ceiling` bytes or more is looked at but the guess.
    """
    fits, room, fails, lacking, number = among.known, None, None, 0, guess
    for _ in range(times):
        near = max(among.step, NOT_WORTH_A_RUN * fits)
        if fails is not None and not fits + near <= number < fails:
            # What is short beside the bytes of the points is no matter of a line: between what fits and what does not.
            share = 0.5 if room is None else room / (room + lacking)
            number = (fits + int(share * (fails - fits))) // among.step * among.step
            if number - fits < near and fails - fits > WIDE * fits:
                number = (fits + fails) // 2 // among.step * among.step
        if number - fits < near:
            break
        points[number], excess = measure(number)
        if excess <= 0:
            # There is this much room. Where that is more than the points say, the line goes on.
            fits, room, limit = number, -excess, max(limit, points[number] - excess)
        else:
            fails, lacking, among = number, excess, among._replace(most=number - among.step)
            limit = min(limit, points[number]) - excess
        number = points.largest(int(min(limit, ceiling - 1)), among)
    return fits, number
