"""Compiles blocks under the choices that the plan makes inside them, together with blocks that stay recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tightfit.errors import CompileError
from tightfit.levers.recompute import Policy
from tightfit.planner.blocks.fused import FusedPrices, estimated, price_fused
from tightfit.planner.blocks.solve import Solution, least_peak, solve
from tightfit.planner.levers import Combination, CompiledBlocks, Recompute
from tightfit.planner.records import Rejected
from tightfit.planner.search.candidates import UNSEEN_BYTES, Baseline, Candidate
from tightfit.planner.search.selection import Selection
from tightfit.tracing.record import StepTrace

SOLVED_AGAIN = 4  # how often blocks are solved again when the trace of a choice takes other bytes than its price
LEAST_GAIN = 0.005  # of a step: where another choice gains less, no trace is spent on it


def fuse_blocks(selection: Selection, baselines: Sequence[Baseline]) -> bool:
    """Try compiled blocks, with choices of the plan inside, beside the most promising of these combinations.

    Returns False where that is not possible: the choices need `recompute`, and blocks that can be captured.
    """
    if not (selection.request.may(CompiledBlocks) and selection.request.may(Recompute)):
        return False
    bound = selection.budget_bytes - UNSEEN_BYTES
    base = _most_promising(baselines, bound)
    if base is None or base.priced is None:
        return False
    combination = base.combination

    def trace(policies: Mapping[str, Policy]) -> StepTrace:
        compiled = combination.with_lever(CompiledBlocks((), tuple(policies)))
        return selection.tracer.part(compiled, policies, selection.plain, compared=True)

    try:
        prices = price_fused(base.priced, trace, selection.plain, bound)
    except CompileError as error:
        selection.rejected.append(Rejected(CompiledBlocks.title, f"cannot be compiled under a plan: {error}"))
        return False
    if selection.tracer.refused:
        for reason in dict.fromkeys(selection.tracer.refused.values()):
            selection.rejected.append(Rejected(CompiledBlocks.title, f"cannot be compiled under a plan: {reason}"))
        return False
    _solve(selection, combination, prices, bound)
    return True


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


def _solve(selection: Selection, combination: Combination, prices: FusedPrices, bound: int) -> None:
    tried: set[tuple[int, ...]] = set()
    fits: Candidate | None = None
    for _ in range(SOLVED_AGAIN):
        solution = solve(prices.solved.chain, bound)
        if solution is None and not tried and selection.best is None:
            solution = least_peak(prices.solved.chain)
        if solution is None or solution.choice in tried:
            return
        tried.add(solution.choice)
        candidate = _traced(selection, combination, prices, solution)
        selection.consider(candidate, f"{candidate.combination}, blocks solved")
        excess = selection.excess(candidate)
        if excess > 0:
            bound = min(bound, solution.peak_bytes) - excess
            if fits is not None:
                return
            continue
        if fits is not None and fits.seconds - candidate.seconds < LEAST_GAIN * fits.seconds:
            return
        fits = candidate
        # What the blocks take less than their prices say is room for a faster choice.
        bound = selection.budget_bytes - UNSEEN_BYTES + solution.peak_bytes - candidate.peak_bytes


def _traced(selection: Selection, combination: Combination, prices: FusedPrices, solution: Solution) -> Candidate:
    paths = prices.paths(solution.choice)
    lever = CompiledBlocks((), paths) if paths else None
    candidate = selection.trace_applied(
        combination.with_lever(lever), prices.solved.policies(solution.choice), prices.shown, solution.choice
    )
    return replace(candidate, choice=solution.choice)
