"""The largest whole number that fits, from few questions. No torch here.

There are two kinds of question: a measure that is cheap and only about right, and a test that is certain and dear. The
measure is asked until it has the number, by the secant of its last two answers (what a step holds is near enough a
straight line in its batch or its length), with a bisection wherever that closes in too slowly. The test is asked from
there on: mostly twice, for the number and for the one above it.
"""

from collections.abc import Callable

GROWTH = 16  # the most that one guess is larger than what is known to fit
UNBRACKETED = 3  # guesses that may all be too large before the secant gives way to a bisection
UNBOUNDED = 2**30  # a number that nothing reaches whose memory grows with it


def rough_bound(measure: Callable[[int], int], limit: int, top: int, guess: int = 1) -> int:
    """The largest number from 1 to `top` whose measure is at most `limit`, assuming that the measure never falls; 0
    where there is none. The number is thought to lie near `guess`.
    """
    answers: list[tuple[int, int]] = []
    low, high, span = 0, top + 1, top + 1
    while high - low > 1:
        answers.append((guess, measure(guess)))
        low, high = (guess, high) if answers[-1][1] <= limit else (low, guess)
        is_bracketed = high <= top and (low > 0 or len(answers) > UNBRACKETED)
        too_slow = is_bracketed and (high - low) * 2 > span
        guess = (low + high) // 2 if too_slow else _secant(answers[-2:], limit, high - 1)
        span = high - low
        guess = max(low + 1, min(guess, high - 1, low * GROWTH if low else high))
    return low


def _secant(answers: list[tuple[int, int]], limit: int, most: int) -> int:
    """Where the straight line through two answers meets the limit; `most` where it never does."""
    if len(answers) < 2:
        return answers[0][0] + 1
    (x, y), (other_x, other_y) = answers
    rise = (other_y - y) / (other_x - x)
    return most if rise <= 0 else min(most, int(other_x + (limit - other_y) / rise))


def certain_bound(fits: Callable[[int], bool], guess: int, top: int) -> int:
    """The number near `guess`, from 1 to `top`, that fits while the one above it does not; 0 where 1 does not fit."""
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
