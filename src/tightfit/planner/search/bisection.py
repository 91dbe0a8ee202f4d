"""Finds the largest whole number that fits, with few evaluations. No torch here.

Two functions are available: a cheap, approximate measure and an expensive, exact test. `rough_bound` uses the measure.
It follows the secant of the last two values, because the memory of a step is nearly linear in its batch and its
length, and bisects where the secant converges too slowly. `certain_bound` starts from that number and uses the test,
mostly twice: for the number and for the one above it.
"""

from collections.abc import Callable

GROWTH = 16  # a guess is at most this many times the largest number known to fit
UNBRACKETED = 3  # guesses that may all be too large before bisection replaces the secant
UNBOUNDED = 2**30  # a number that does not fit anything whose memory grows with it


def rough_bound(measure: Callable[[int], int], limit: int, top: int, guess: int = 1) -> int:
    """The largest number from 1 to `top` whose measure is at most `limit`; 0 if there is none.

    The measure is assumed never to fall. The search starts at `guess`.
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
