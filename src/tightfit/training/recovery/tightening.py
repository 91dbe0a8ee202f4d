"""Undo, tighten, run again: the loop around a step that runs out of memory, and the next plan."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tightfit.errors import CannotFit
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.training.recovery.catching import Failure, insist
from tightfit.units import format_bytes

# Of the peak in force: what the next plan may take after the first, second, ... failure of one step. Small steps first,
# since a failure is most often a few per cent that a prediction does not have; then fast, since each try takes a plan.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)

P = TypeVar("P")
F = TypeVar("F")


def run_until_it_fits(
    attempt: Callable[[], F | None],
    undo: Callable[[], Any],
    tighten: Callable[[F, Sequence[int]], int],
    device: torch.device,
) -> None:
    """Run a step again under tighter plans until memory suffices.

    Args:
        attempt: Runs the step, and returns its failure, or None where it is done.
        undo: Puts back what the step has changed. It may be called again.
        tighten: Puts the next tighter plan in force, given the failure and the predicted peaks of the plans that failed
            before the present one. Returns the peak of the plan that it replaces; raises `CannotFit` if no plan is
            left.
        device: The device of the step.
    """
    tried: list[int] = []
    while (failure := attempt()) is not None:
        insist(undo, device)
        tried.append(tighten(failure, tried))


def next_plan(within: Callable[[int], P], failure: Failure, peaks: Sequence[int], where: str, todo: str) -> P:
    """The plan after those with these predicted peaks, which all ran out of memory.

    `within` makes a plan within so many bytes. Raises `CannotFit` where no plan is tighter: `where` names the step, and
    `todo` what a user can do.
    """
    found = tighter(within, next_bound(failure, peaks[-1], len(peaks)), peaks[-1])
    if found is None:
        raise no_tighter_plan(failure, where, peaks, todo)
    return found


def next_bound(failure: Failure, peak_bytes: int, failures: int) -> int:
    """The peak that a plan may have after so many failures of one step, if the last one had this predicted peak."""
    bound = int(peak_bytes * SHARES[min(failures, len(SHARES)) - 1])
    return bound if failure.room_bytes is None else min(bound, failure.room_bytes)


def tighter(within: Callable[[int], P], bound_bytes: int, peak_bytes: int) -> P | None:
    """The fastest plan within a bound, else the one of least peak if that is below the present one; None where there is
    none. `within` makes a plan within so many bytes, and raises `CannotFit`.
    """
    try:
        return within(max(1, bound_bytes))  # what was measured may be beyond the bound by more than all of it
    except CannotFit as error:
        least = error.least_bytes + UNSEEN_BYTES
    if least >= peak_bytes:
        return None
    try:
        return within(least)
    except CannotFit:
        return None


def no_tighter_plan(failure: Failure, where: str, tried_bytes: Sequence[int], todo: str) -> CannotFit:
    """The error where the plans that were tried all ran out of memory."""
    peaks = ", ".join(format_bytes(peak) for peak in tried_bytes)
    return CannotFit(
        f"{where}: {failure}, and no tighter plan is left: tried at a predicted peak of {peaks}; the step was undone: "
        f"{todo}",
        tried_bytes[-1],
    )
