"""Runs the blocks of a plan that was found as captured programs, where that is faster, or fits at last."""

import math
from dataclasses import replace

from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.planner.blocks.captured import priced_as_captured, saved_seconds
from tightfit.planner.blocks.solve import peak, solve
from tightfit.planner.levers import CapturedBlocks, Role, Stream
from tightfit.planner.records import Rejected
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.search import Search
from tightfit.units import format_seconds

LEAST_SAVING = 0.002  # of a step: where capturing saves less by its prices, no trace is spent on it
LEAST_GAIN = 0.01  # of a step: where a second choice for captured blocks gains less, no trace is spent on it
WORTH_A_WORD = 0.05  # of a step
NEARLY = 0.9  # of the least peak: captured blocks need a few per cent less than recorded ones, at most
# Of recording blocks before the first step and while planning: 3 s for PyTorch's tracers, and 1 to 2 s for each kind of
# block and each of its policies (notes/compiled-and-captured.md, "Captured blocks").
RECORDING_SECONDS = 10.0
SOLVED_AGAIN = 6  # how often blocks are solved again with the prices of captured ones


def capture_blocks(search: Search) -> None:
    """Run the blocks of the fastest plan so far as captured programs, where that is faster, or fits at last.

    Other combinations are not tried: blocks of one kind and policy are captured anew for each shape, which takes
    longer than their traces.
    """
    base = search.solved or search.least
    if base is None or not may_capture(search):
        _say_what_it_would_save(search)
        return
    if search.best is not None and base.combination == search.mixed:
        return  # captured blocks were options beside compiled ones
    if base.combination.get(Stream) is not None:
        return  # captured blocks are not streamed
    if any(base.combination.get(kind) for kind in search.of_role(Role.WHOLE_BLOCKS)):
        return  # compiled blocks are the least, and nothing fits: a block is compiled or captured
    if search.best is None and search.budget_bytes < NEARLY * base.needed_bytes:
        return
    paths = tuple(path for path in search.paths if not base.policies.get(path, KEEP_ALL).offloads)
    saved = saved_seconds(base.trace, paths, search.request.executor)
    if search.best is not None and saved < LEAST_SAVING * base.seconds:
        reason = f"would save less than {LEAST_SAVING:.1%} of the step"
        search.rejected.append(Rejected(CapturedBlocks.title, reason))
        return
    is_solved = base.priced is not None and len(paths) == len(search.paths)
    if is_solved and search.best is not None:
        # Recording the policies of the plan so far too would take as long as a trace.
        _solve_captured(search, base, paths, 0)
        return
    candidate = _trace_captured(search, base, base.policies, base.choice, paths)
    if candidate is None:
        return
    search.consider(candidate, str(candidate.combination))
    if is_solved and base.priced is not None:
        _solve_captured(search, base, paths, peak(base.priced.chain, base.choice) - candidate.peak_bytes)


def may_capture(search: Search) -> bool:
    """True if captured blocks are allowed, by name or since the steps to come repay them."""
    if not search.request.may(CapturedBlocks) or not search.paths:
        return False
    return not search.request.may_repay(CapturedBlocks) or _is_repaid(search)


def _is_repaid(search: Search) -> bool:
    """True if the steps to come save more seconds than recording takes, by the prices of the fastest plan so far."""
    if search.best is None or search.request.steps is None:
        return False
    best = search.best
    saved = saved_seconds(best.trace, search.paths, search.request.executor)
    return search.request.steps * saved >= RECORDING_SECONDS


def _say_what_it_would_save(search: Search) -> None:
    """Note what captured blocks would save on a card, where nobody said how often the step will run.

    There a small step waits for its launches: on an H200 a recorded plan was slower than PyTorch's checkpoint, and a
    captured one up to 1.9 times as fast as it (notes/null-card.md, "The first real card").
    """
    request, best = search.request, search.best
    if best is None or request.steps is not None or not replace(request, steps=1).may_repay(CapturedBlocks):
        return
    saved = saved_seconds(best.trace, search.paths, request.executor)
    if request.device.kind == "cuda" and saved >= WORTH_A_WORD * best.seconds:
        reason = (
            f"would save about {format_seconds(saved)} of each step, after {format_seconds(RECORDING_SECONDS)} of "
            f"recording: say how many steps will run (steps={math.ceil(RECORDING_SECONDS / saved)} or more), or name "
            "capture among the levers"
        )
        search.rejected.append(Rejected(CapturedBlocks.title, reason))


def _solve_captured(search: Search, base: Candidate, paths: tuple[str, ...], room: int) -> None:
    """Solve the choices inside blocks again, with the prices of captured blocks.

    `room` is the number of bytes that they need less than the recorded blocks of `base`.
    """
    assert base.priced is not None, "blocks are solved by their prices"
    again = priced_as_captured(base.priced, paths, base.trace, base.combination.micro_batches)
    bound = search.budget_bytes - UNSEEN_BYTES + room
    tried, fits = [base.policies] if room else [], math.inf
    for number in range(SOLVED_AGAIN):
        solution = solve(again.chain, bound)
        if solution is None or (policies := again.policies(solution.choice)) in tried:
            return
        if solution.seconds > fits - LEAST_GAIN * base.seconds:
            return
        tried.append(policies)
        candidate = _trace_captured(search, base, policies, solution.choice, paths)
        if candidate is None:
            return
        candidate = replace(candidate, priced=again)
        search.consider(candidate, f"{candidate.combination}, blocks solved")
        excess = search.excess(candidate)
        if math.isfinite(fits):
            return
        if excess > 0:
            # Twice as far each time: the peak may lie where the prices, which are of recorded blocks, do not see it.
            bound = min(bound, solution.peak_bytes) - excess * 2**number
        else:
            # What captured blocks do not take is room for a faster choice.
            fits = solution.seconds
            bound = search.budget_bytes - UNSEEN_BYTES + solution.peak_bytes - candidate.peak_bytes


def _trace_captured(
    search: Search, base: Candidate, policies: dict[str, Policy], choice: tuple[int, ...], paths: tuple[str, ...]
) -> Candidate | None:
    """The step with the blocks at `paths` captured; None if none of them can be. Says why others are not."""
    combination = base.combination.with_lever(CapturedBlocks(paths))
    candidate = search.trace_applied(combination, policies, base.priced, choice)
    refused = reject_refused(search)
    left = tuple(path for path in paths if path not in refused)
    # Blocks that are refused run in the trace as they will without the lever.
    return replace(candidate, combination=base.combination.with_lever(CapturedBlocks(left))) if left else None


def reject_refused(search: Search) -> dict[str, str]:
    """Why blocks of the last trace could not be captured, by path. Says so in the plan."""
    refused = dict(search.tracer.refused)
    for reason in dict.fromkeys(refused.values()):
        count = sum(each == reason for each in refused.values())
        name = f"{CapturedBlocks.title} ({count} of {len(search.paths)} blocks)"
        row = Rejected(name, f"cannot be captured: {reason}")
        if row not in search.rejected:
            search.rejected.append(row)
    return refused
