"""Compiles blocks under the choices that the plan makes inside them, beside recorded and captured blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tightfit.errors import CompileError
from tightfit.levers.recompute import Policy
from tightfit.planner.blocks.captured import Captured
from tightfit.planner.blocks.fused import FusedPrices, estimated, price_fused
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Solution, least_peak, solve
from tightfit.planner.levers import CapturedBlocks, Combination, CompiledBlocks, Recompute
from tightfit.planner.records import Rejected
from tightfit.planner.search.candidates import UNSEEN_BYTES, Baseline, Candidate
from tightfit.planner.search.capturing import may_capture, reject_all, reject_refused
from tightfit.planner.search.search import Search
from tightfit.tracing.record import StepTrace

SOLVED_AGAIN = 4  # how often blocks are solved again when the trace of a choice takes other bytes than its price
LEAST_GAIN = 0.005  # of a step: where another choice gains less, no trace is spent on it


def fuse_blocks(search: Search, baselines: Sequence[Baseline]) -> bool:
    """Try compiled blocks, with choices of the plan inside, beside the most promising of these combinations.

    Where captured blocks are allowed, they are options in the same solution. Returns False where that is not possible:
    the choices need `recompute`, and blocks that can be captured.
    """
    if not (search.request.may(CompiledBlocks) and search.request.may(Recompute)):
        return False
    bound = search.budget_bytes - UNSEEN_BYTES
    base = _most_promising(baselines, bound)
    if base is None or base.priced is None:
        return False
    combination = base.combination

    def trace(policies: Mapping[str, Policy]) -> StepTrace:
        compiled = combination.with_lever(CompiledBlocks((), tuple(policies)))
        return search.tracer.part(compiled, policies, search.plain, compared=True)

    try:
        prices = price_fused(base.priced, trace, search.plain, bound, _captured(search, combination, base.priced))
    except CompileError as error:
        search.rejected.append(Rejected(CompiledBlocks.title, f"cannot be compiled under a plan: {error}"))
        return False
    if search.tracer.refused:
        for reason in dict.fromkeys(search.tracer.refused.values()):
            search.rejected.append(Rejected(CompiledBlocks.title, f"cannot be compiled under a plan: {reason}"))
        return False
    _solve(search, combination, prices, bound)
    return True


def _captured(search: Search, combination: Combination, priced: Priced) -> Captured | None:
    """The options of captured blocks; None where they are not allowed, or save next to nothing."""
    if not may_capture(search):
        return None
    search.mixed = combination
    executor, micro_batches = search.request.executor, combination.micro_batches
    return Captured(priced, priced.paths, executor, search.plain, micro_batches)


def _most_promising(baselines: Sequence[Baseline], bound: int) -> Baseline | None:
    """The combination whose step would be the fastest in compiled code, else that of least peak."""
    fastest: tuple[float, Baseline] | None = None
    for baseline in baselines:
        if baseline.priced is None or not baseline.priced.paths:
            continue
        found = solve(estimated(baseline.priced).chain, bound)
        if found is not None and (fastest is None or baseline.seconds + found.seconds < fastest[0]):
            fastest = baseline.seconds + found.seconds, baseline
    if fastest is not None:
        return fastest[1]
    priced = [baseline for baseline in baselines if baseline.priced is not None and baseline.priced.paths]
    return min(priced, key=lambda baseline: least_peak(baseline.chain).peak_bytes, default=None)


def _solve(search: Search, combination: Combination, prices: FusedPrices, bound: int) -> None:
    tried: set[tuple[tuple[str, ...], tuple[str, ...], frozenset[tuple[str, Policy]]]] = set()
    fits: Candidate | None = None
    for _ in range(SOLVED_AGAIN):
        solution = solve(prices.solved.chain, bound)
        if solution is None and not tried and search.best is None:
            solution = least_peak(prices.solved.chain)
        if solution is None:
            return
        policies = prices.solved.policies(solution.choice)
        # Not the choice itself: its numbers change where blocks turn out not to be captured.
        key = prices.compiled(solution.choice), prices.captured(solution.choice), frozenset(policies.items())
        if key in tried:
            return
        tried.add(key)
        candidate, refused = _traced(search, combination, prices, solution)
        search.consider(candidate, f"{candidate.combination}, blocks solved")
        excess = search.excess(candidate)
        if refused:
            prices = prices.without_captured(refused)
            continue
        prices = prices.corrected(candidate.trace, solution.choice)
        if excess > 0:
            bound = min(bound, solution.peak_bytes) - excess
            if fits is not None:
                return
            continue
        if fits is not None and fits.seconds - candidate.seconds < LEAST_GAIN * fits.seconds:
            return
        fits = candidate
        # What the blocks take less than their prices say is room for a faster choice.
        bound = search.budget_bytes - UNSEEN_BYTES + solution.peak_bytes - candidate.peak_bytes


def _traced(
    search: Search, combination: Combination, prices: FusedPrices, solution: Solution
) -> tuple[Candidate, tuple[str, ...]]:
    """The step with a choice, and the blocks that it captures and that cannot be captured."""
    compiled, captured = prices.compiled(solution.choice), prices.captured(solution.choice)
    levers = combination.with_lever(CompiledBlocks((), compiled) if compiled else None)
    policies = prices.solved.policies(solution.choice)
    both = levers.with_lever(CapturedBlocks(captured) if captured else None)
    try:
        candidate = search.trace_applied(both, policies, prices.shown, solution.choice)
        refused = reject_refused(search) if captured else {}
    except CompileError as error:
        if not captured:
            raise
        reject_all(search, error)
        candidate = search.trace_applied(levers, policies, prices.shown, solution.choice)
        refused = dict.fromkeys(captured, str(error))
    left = tuple(path for path in captured if path not in refused)
    combination = levers.with_lever(CapturedBlocks(left) if left else None)
    candidate = replace(candidate, combination=combination, choice=solution.choice)
    return candidate, tuple(path for path in captured if path in refused)
