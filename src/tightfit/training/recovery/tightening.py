"""How much less the next plan may take, and which plan that is."""

from collections.abc import Callable
from typing import TypeVar

from tightfit.errors import CannotFit
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.training.recovery.catching import Failure
from tightfit.units import format_bytes

# Of the peak in force: what the next plan may take after the first, second, ... failure of one step. Small steps first,
# since a failure is most often a few per cent that a prediction does not have; then fast, since each try takes a plan.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)

P = TypeVar("P")


def next_bound(failure: Failure, peak_bytes: int, failures: int) -> int:
    """The peak that a plan may have after so many failures of one step, if the last one had this predicted peak."""
    bound = int(peak_bytes * SHARES[min(failures, len(SHARES)) - 1])
    return bound if failure.room_bytes is None else min(bound, failure.room_bytes)


def tighter(within: Callable[[int], P], bound_bytes: int, peak_bytes: int) -> P | None:
    """The fastest plan within a bound, else the one of least peak if that is below the present one; None where there is
    none. `within` makes a plan within so many bytes, and raises `CannotFit`.
    """
    try:
        return within(bound_bytes)
    except CannotFit as error:
        least = error.least_bytes + UNSEEN_BYTES
    if least >= peak_bytes:
        return None
    try:
        return within(least)
    except CannotFit:
        return None


def no_tighter_plan(failure: Failure, where: str, tried_bytes: list[int], todo: str) -> CannotFit:
    """The error where the plans that were tried all ran out of memory."""
    peaks = ", ".join(format_bytes(peak) for peak in tried_bytes)
    return CannotFit(
        f"{where}: {failure}, and no tighter plan is left: tried at a predicted peak of {peaks}; the step was undone: "
        f"{todo}",
        tried_bytes[-1],
    )
