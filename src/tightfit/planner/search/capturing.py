"""Runs the blocks of a plan that was found as captured programs, where that is faster, or fits at last."""

import math
from dataclasses import replace

from tightfit.errors import CompileError
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, Policy
from tightfit.planner.blocks.captured import priced_as_captured, saved_seconds
from tightfit.planner.blocks.solve import peak, solve
from tightfit.planner.levers import CapturedBlocks, Recompute, Role, Stream
from tightfit.planner.records import Rejected
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.search import Search

LEAST_SAVING = 0.002  # of a step: where capturing saves less by its prices, no trace is spent on it
LEAST_GAIN = 0.01  # of a step: where a second choice for captured blocks gains less, no trace is spent on it
# Of a step of which nobody said how often it runs: recording is repaid once 20 times its seconds were trained. On cards
# small steps wait for their launches: on an H200 recorded plans were slower than PyTorch's checkpoint, and captured
# ones up to 1.9 times as fast as it (notes/null-card.md, "The first real card").
LEAST_SHARE = 0.05
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
    # Recording the policies of the plan so far too would take as long as a trace.
    if is_solved and search.best is not None and _solve_captured(search, base, paths, 0):
        return
    candidate = _trace_captured(search, base, base.policies, base.choice, paths)
    if candidate is None:
        return
    search.consider(candidate, str(candidate.combination))
    if is_solved and base.priced is not None:
        _solve_captured(search, base, paths, peak(base.priced.chain, base.choice) - candidate.peak_bytes)
    nothing_kept = dict.fromkeys(search.paths, RECOMPUTE_ALL)
    if search.best is None and base.policies != nothing_kept and search.request.may(Recompute):
        # What is kept so that blocks are recorded at their least may be more than they need as programs.
        least = _trace_captured(search, replace(base, priced=None), nothing_kept, (), paths)
        if least is not None:
            search.consider(least, f"{least.combination}, blocks recomputed whole")


def may_capture(search: Search) -> bool:
    """True if captured blocks are allowed, by name or since the steps to come repay them."""
    if not search.request.may(CapturedBlocks) or not search.paths:
        return False
    return not search.request.may_repay(CapturedBlocks) or _is_repaid(search)


def _is_repaid(search: Search) -> bool:
    """True if the steps to come save more seconds than recording takes, by the prices of the fastest plan so far."""
    fastest, steps = search.best or search.least, search.request.steps
    assert fastest is not None, "the plain step was traced"
    saved = saved_seconds(fastest.trace, search.paths, search.request.executor)
    return saved >= LEAST_SHARE * fastest.seconds if steps is None else steps * saved >= RECORDING_SECONDS


def _solve_captured(search: Search, base: Candidate, paths: tuple[str, ...], room: int) -> bool:
    """Solve the choices inside blocks again, with the prices of captured blocks.

    `room` is the number of bytes that they need less than the recorded blocks of `base`. Returns False if no choice is
    within the budget by its prices, which may be above the peak that `base` was traced with.
    """
    assert base.priced is not None, "blocks are solved by their prices"
    again = priced_as_captured(base.priced, paths, base.trace, base.combination.micro_batches)
    bound = search.budget_bytes - UNSEEN_BYTES + room
    tried, fits = [base.policies] if room else [], math.inf
    for number in range(SOLVED_AGAIN):
        solution = solve(again.chain, bound)
        if solution is None:
            return number > 0
        if (policies := again.policies(solution.choice)) in tried:
            return True
        if solution.seconds > fits - LEAST_GAIN * base.seconds:
            return True
        tried.append(policies)
        candidate = _trace_captured(search, base, policies, solution.choice, paths)
        if candidate is None:
            return True
        candidate = replace(candidate, priced=again)
        search.consider(candidate, f"{candidate.combination}, blocks solved")
        excess = search.excess(candidate)
        if math.isfinite(fits):
            return True
        if excess > 0:
            # Twice as far each time: the peak may lie where the prices, which are of recorded blocks, do not see it.
            bound = min(bound, solution.peak_bytes) - excess * 2**number
        else:
            # What captured blocks do not take is room for a faster choice.
            fits = solution.seconds
            bound = search.budget_bytes - UNSEEN_BYTES + solution.peak_bytes - candidate.peak_bytes
    return True


def _trace_captured(
    search: Search, base: Candidate, policies: dict[str, Policy], choice: tuple[int, ...], paths: tuple[str, ...]
) -> Candidate | None:
    """The step with the blocks at `paths` captured; None if none of them can be. Says why others are not."""
    combination = base.combination.with_lever(CapturedBlocks(paths))
    try:
        candidate = search.trace_applied(combination, policies, base.priced, choice)
    except CompileError as error:  # the step takes gradients of gradients
        reject_all(search, error)
        return None
    refused = reject_refused(search)
    left = tuple(path for path in paths if path not in refused)
    # Blocks that are refused run in the trace as they will without the lever.
    return replace(candidate, combination=base.combination.with_lever(CapturedBlocks(left))) if left else None


def reject_all(search: Search, error: CompileError) -> None:
    """Say in the plan why no block is captured."""
    row = Rejected(CapturedBlocks.title, f"cannot be used: {error}")
    if row not in search.rejected:
        search.rejected.append(row)


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
