"""Finds one plan for all ranks of a world: the levers inside blocks, and whether gathered weights are freed.

A rank's step is what the search plans, as it plans the step of one process otherwise: every trace plays FSDP2 or DDP
around the levers. So prices include gathered weights and buffers, and the plan's peak is that of a rank as it will run.
"""

from dataclasses import dataclass, replace

from tightfit.errors import CannotFit
from tightfit.planner.records import Rejected
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.search import Search
from tightfit.ranks.world import World
from tightfit.tracing.record import StepTrace
from tightfit.units import is_share_of

LOWERINGS = 3  # how often a plan is searched again where a rank other than the first exceeds the budget
# Of a step. Where messages run beside the computing, kept weights save little even without the levers that they need.
WORTH_A_SEARCH = 0.01
KEEPS = "gathered weights kept until backward (reshard_after_forward=False)"
FREES = "gathered weights freed after forward (reshard_after_forward=True)"


@dataclass(frozen=True)
class RanksFound:
    """A search and its best candidate, with the peak of every rank, and the plain step of FSDP2's or DDP's defaults."""

    search: Search
    candidate: Candidate
    peaks: tuple[int, ...]
    plain: StepTrace
    budget_bytes: int
    world: World


def search_ranks(request: Request, world: World, budget: int | str, *, resorts: bool = True) -> RanksFound:
    """The fastest plan with which every rank is within the budget. Raises `CannotFit` with the least peak found.

    Without `resorts`, levers that are tried only where nothing else fits are left out.
    """
    default = Search(request, budget, resorts=resorts)
    if world.parallel == "ddp" or world.shards is not None:  # which a plan does not change
        return _searched(default, world, default)
    keeps = replace(world, reshard_after_forward=False)
    search = Search(replace(request, world=keeps), budget, resorts=resorts)
    if is_share_of(budget, "x"):  # of the plain step with FSDP2's defaults
        search.budget_bytes = default.budget_bytes
    try:
        freed = _searched(default, world, default)
    except CannotFit as error:
        try:
            return _searched(search, keeps, default)  # its blocks can be joined to segments
        except CannotFit as other:
            raise min(error, other, key=lambda each: each.least_bytes) from None
    plain = search.plain
    if plain.peak_bytes > search.budget_bytes and plain.step_seconds > (1 - WORTH_A_SEARCH) * freed.candidate.seconds:
        reason = f"saves less than {WORTH_A_SEARCH:.0%} of the step, even without the levers that it needs"
        freed.search.rejected.append(Rejected(KEEPS, reason, plain.peak_bytes, plain.step_seconds))
        return freed
    try:
        kept = _searched(search, keeps, default)
    except CannotFit as error:
        freed.search.rejected.append(Rejected(KEEPS, "over the budget at its least", error.least_bytes))
        return freed
    best, other, name = (
        (kept, freed, FREES) if kept.candidate.seconds <= freed.candidate.seconds else (freed, kept, KEEPS)
    )
    row = Rejected(name, "fits, but is slower", other.candidate.peak_bytes, other.candidate.seconds)
    best.search.rejected.append(row)
    return best


def _searched(search: Search, world: World, default: Search) -> RanksFound:
    """The best candidate of a search, lowered until the largest of all ranks fits."""
    budget = search.budget_bytes
    for _ in range(LOWERINGS):
        candidate = search.run()
        found = search.tracer.ranks(
            world, candidate.combination, candidate.policies, candidate.joined, first=candidate.trace
        )
        over = max(found.peaks) + UNSEEN_BYTES - budget
        if over <= 0:
            return RanksFound(search, candidate, found.peaks, default.plain, budget, world)
        # The first rank has the largest shards, but an optimizer that orders whole matrices may load another one more.
        lowered = Search(search.request, search.budget, resorts=search.resorts)
        lowered.budget_bytes = search.budget_bytes - over
        search = lowered
    least = max(found.peaks) + UNSEEN_BYTES
    raise CannotFit(f"no plan was found with which all {world.size} ranks fit: the largest takes {least} bytes", least)
