"""Batches of every length in as few micro-batches as their predicted bytes allow.

A batch's sequences are `training.batch_size`, whatever its length; a shorter one needs less memory for each. Its
length is rounded up to one of a few, and each of these is run dry under the levers of the longest, in fewer and fewer
micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from tightfit.errors import CannotFit
from tightfit.units import format_bytes


@dataclass(frozen=True)
class Bucket:
    """Batches of at most `length` tokens a row: their equal micro-batches, and the peak that is predicted for them."""

    length: int
    micro_batches: int
    peak_bytes: int


@dataclass(frozen=True)
class PredictedLength:
    """The predicted peak of one length in some micro-batches, and whether that is within the budget."""

    peak_bytes: int
    fits: bool


def sized(
    lengths: Sequence[int], counts: Sequence[int], run_dry: Callable[[int, int], PredictedLength], longest: Bucket
) -> tuple[Bucket, ...]:
    """A bucket for each of `lengths`, and `longest`, which is planned already; in ascending order.

    `counts` are the numbers of micro-batches that are allowed, `run_dry(length, count)` predicts. A shorter length
    begins with the count of the next longer one and takes fewer as long as that fits. Raises `CannotFit`.
    """
    counts, run_dry = sorted(counts), cache(run_dry)
    place, buckets = counts.index(longest.micro_batches), [longest]
    for length in sorted((length for length in lengths if length < longest.length), reverse=True):
        found = run_dry(length, counts[place])
        while not found.fits and place + 1 < len(counts):  # a shorter one that needs more, for a mask or a copy
            place += 1
            found = run_dry(length, counts[place])
        if not found.fits:
            raise CannotFit(
                f"batches of {length} tokens a row take {format_bytes(found.peak_bytes)} under the plan for the "
                f"longest, which is more than the budget: set data.buckets to false",
                found.peak_bytes,
            )
        while place > 0 and (fewer := run_dry(length, counts[place - 1])).fits:
            place, found = place - 1, fewer
        buckets.append(Bucket(length, counts[place], found.peak_bytes))
    return tuple(reversed(buckets))
