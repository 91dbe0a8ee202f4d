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
class Way:
    """Levers for about the least peak of a step, without the number of micro-batches, which depends on the batch."""

    combination: Combination
    policies: Mapping[str, Policy]
    joined: tuple[str, ...] = ()


def least_way(search: Search, plain: StepTrace, *, joining: bool = True) -> tuple[Way, int]:
    """The way of least peak among those that a plan may use, and its peak in bytes.

    `plain` is a plain step of the same model, with any batch. With `joining`, blocks joined to segments are tried too.
    Raises `LeverError` if no way can be applied to the model.
    """
    ways = [_frugal(search, plain)]
    flat = ways[0].combination.without(*search.of_role(Role.WHOLE_BLOCKS))
    for kind in search.of_role(Role.LAST):
        ways += [replace(ways[0], combination=flat.with_lever(each)) for each in kind.settings(search.step(plain))[-1:]]
    peaks: dict[int, int] = {}
    refused: LeverError | None = None
    for index, way in enumerate(ways):
        try:
            peaks[index] = peak_of(search, plain, way)
        except LeverError as error:  # a module that cannot be tiled: the other ways remain
            refused = refused or error
    if not peaks and refused is not None:
        raise refused
    best = min(peaks, key=peaks.__getitem__)
    may = search.request.may
    way, peak = ways[best], peaks[best]
    # With offload the inputs of blocks have left the device already, so joining blocks would save nothing.
    if joining and may(Recompute) and not may(Offload) and peak > optimizer_peak(plain):
        return _joined(search, plain, way, peak)
    return way, peak


def peak_of(search: Search, plain: StepTrace, way: Way) -> int:
    """The approximate peak of a way in bytes, from one dry run of forward and backward."""
    part = search.tracer.part(sized(search, way), way.policies, plain, way.joined)
    return max(part.peak_bytes, optimizer_peak(plain))


def as_it_will_run(search: Search, way: Way) -> StepTrace:
    """The whole step with these levers, optimizer included."""
    return search.whole(sized(search, way), dict(way.policies), way.joined)


def sized(search: Search, way: Way) -> Combination:
    """The way's combination with the largest number of micro-batches that the search's batch allows."""
    request = search.request
    may = request.may(MicroBatches)
    counts = MicroBatches.apart(request.separation, request.micro_batches, request.size) if may else []
    sized = counts[-1:] or request.plain.levers
    return way.combination.without(MicroBatches).with_lever(sized[0] if sized else None)


def _frugal(search: Search, plain: StepTrace) -> Way:
    combination, inside = search.combinations(plain)[-1], search.of_role(Role.INSIDE_BLOCKS)
    for kind in search.of_role(Role.WHOLE_BLOCKS) if search.paths and not inside else ():
        return Way(combination.with_lever(kind.settings(search.step(plain))[-1]), {})
    policies = [kind.frugal_policy(search.request.levers) for kind in inside]
    return Way(combination, dict.fromkeys(search.paths, policies[-1] if policies else KEEP_ALL))


def _joined(search: Search, plain: StepTrace, way: Way, peak: int) -> tuple[Way, int]:
    """The way with its blocks joined to the number of segments that lowers its peak most, and that peak."""
    best, worse, paths = (way, peak), 0, search.paths
    for segments in segment_counts(len(paths)):
        joined = replace(way, joined=every_block(paths, segments=segments).joined)
        found = peak_of(search, plain, joined)
        best, worse = ((joined, found), 0) if found < best[1] else (best, worse + 1)
        if worse == WORSE_IN_A_ROW:
            break
    return best
