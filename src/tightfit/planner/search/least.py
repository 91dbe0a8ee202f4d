"""Estimates the least peak of a step from single traces. The search for a largest value uses it before it plans."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightfit.errors import LeverError
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.levers.recompute.rule import every_block
from tightfit.planner.levers import Combination, MicroBatches, Offload, Recompute, Role
from tightfit.planner.request import optimizer_peak
from tightfit.planner.search.last_resorts import segment_counts
from tightfit.planner.search.search import Search
from tightfit.tracing.record import StepTrace

WORSE_IN_A_ROW = 2  # worse numbers of segments after which the search stops: the peak falls and then rises with them


@dataclass(frozen=True)
class LeastLevers:
    """Levers for about the least peak of a step, without the number of micro-batches, which depends on the batch."""

    combination: Combination
    policies: Mapping[str, Policy]
    joined: tuple[str, ...] = ()


def least_levers(search: Search, plain: StepTrace, *, joining: bool = True, enough: int = 0) -> tuple[LeastLevers, int]:
    """The levers of least peak among those that a plan may use, and that peak in bytes.

    `plain` is a plain step of the same model, with any batch. With `joining`, blocks joined to segments are tried too.
    A peak of at most `enough` bytes ends the search. Raises `LeverError` if no levers can be applied to the model.
    """
    enough = max(enough, optimizer_peak(plain))  # which no lever lowers
    tried = [_frugal(search, plain)]
    flat = tried[0].combination.without(*search.of_role(Role.WHOLE_BLOCKS))
    for kind in search.of_role(Role.LAST):
        last = kind.settings(search.step(plain))[-1:]
        tried += [replace(tried[0], combination=flat.with_lever(setting)) for setting in last]
    peaks: dict[int, int] = {}
    refused: LeverError | None = None
    for index, levers in enumerate(tried):
        if peaks and min(peaks.values()) <= enough:
            break
        try:
            peaks[index] = peak_of(search, plain, levers)
        except LeverError as error:  # a module that cannot be tiled: the others remain
            refused = refused or error
    if not peaks and refused is not None:
        raise refused
    best = min(peaks, key=peaks.__getitem__)
    may = search.request.may
    levers, peak = tried[best], peaks[best]
    # With offload the inputs of blocks have left the device already, so joining blocks would save nothing.
    if joining and may(Recompute) and not may(Offload) and peak > enough:
        return _joined(search, plain, levers, peak)
    return levers, peak


def priced_levers(search: Search, plain: StepTrace, levers: LeastLevers, peak: int) -> tuple[LeastLevers, int]:
    """The levers of the least peak by the prices of their blocks, if that is below `peak`, which `levers` have, and it.

    What a block replays may hold more at once than it would keep, so recomputing everything is not always the least.
    """
    if not levers.policies or not search.of_role(Role.INSIDE_BLOCKS):
        return levers, peak
    baseline = search.baseline(sized(search, levers))
    priced = replace(levers, policies=baseline.policies(baseline.least_choice), joined=())
    found = peak_of(search, plain, priced)
    return (priced, found) if found < peak else (levers, peak)


def peak_of(search: Search, plain: StepTrace, levers: LeastLevers) -> int:
    """The approximate peak with these levers in bytes, from one dry run of forward and backward."""
    part = search.tracer.part(sized(search, levers), levers.policies, plain, levers.joined)
    return max(part.peak_bytes, optimizer_peak(plain))


def as_it_will_run(search: Search, levers: LeastLevers) -> StepTrace:
    """The whole step with these levers, optimizer included."""
    return search.whole(sized(search, levers), dict(levers.policies), levers.joined)


def sized(search: Search, levers: LeastLevers) -> Combination:
    """Their combination with the largest number of micro-batches that the search's batch allows."""
    request = search.request
    may = request.may(MicroBatches)
    counts = MicroBatches.apart(request.separation, request.micro_batches, request.size) if may else []
    sized = counts[-1:] or request.plain.levers
    return levers.combination.without(MicroBatches).with_lever(sized[0] if sized else None)


def _frugal(search: Search, plain: StepTrace) -> LeastLevers:
    combination, inside = search.combinations(plain)[-1], search.of_role(Role.INSIDE_BLOCKS)
    for kind in search.of_role(Role.WHOLE_BLOCKS) if search.paths and not inside else ():
        return LeastLevers(combination.with_lever(kind.settings(search.step(plain))[-1]), {})
    policies = [kind.frugal_policy(search.request.levers) for kind in inside]
    return LeastLevers(combination, dict.fromkeys(search.paths, policies[-1] if policies else KEEP_ALL))


def _joined(search: Search, plain: StepTrace, levers: LeastLevers, peak: int) -> tuple[LeastLevers, int]:
    """The levers with blocks joined to the number of segments that lowers the peak most, and that peak."""
    best, worse, paths = (levers, peak), 0, search.paths
    for segments in segment_counts(len(paths)):
        joined = replace(levers, joined=every_block(paths, segments=segments).joined)
        found = peak_of(search, plain, joined)
        best, worse = ((joined, found), 0) if found < best[1] else (best, worse + 1)
        if worse == WORSE_IN_A_ROW:
            break
    return best
