"""About the least that a step takes, from single traces: what a search for the largest value asks before it plans."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from tightfit.errors import LeverError
from tightfit.levers.offload.lever import INPUTS_ONLY
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, Policy
from tightfit.levers.recompute.lever import segment_ends
from tightfit.levers.recompute.policy import OFFLOAD_ALL
from tightfit.planner.request import Combination, optimizer_peak
from tightfit.planner.search import Search, segment_counts
from tightfit.planner.variants import compiled_alike, tiled
from tightfit.trace.record import StepTrace

WORSE_IN_A_ROW = 2  # counts of segments after which no other is looked at: the peak falls and rises again with them


@dataclass(frozen=True)
class Way:
    """A way to run a step at about its least, without the parts that depend on the batch's size."""

    combination: Combination
    policies: Mapping[str, Policy]
    joined: tuple[str, ...] = ()


def least_way(search: Search, plain: StepTrace, *, joining: bool = True) -> tuple[Way, int]:
    """The way of least peak among those that a plan may take, with its peak. `plain` is the search's own plain step, or
    that of the same model with another batch. Only where they are `joining`, blocks in segments are among the ways.
    """
    ways = [_frugal(search, plain)]
    request, levers = search.request, search.request.levers
    if "tile" in levers:
        flat = replace(ways[0].combination, compiled=None)
        ways += [replace(ways[0], combination=c) for c in tiled(flat, request, plain, search.paths)[-1:]]
    peaks: dict[int, int] = {}
    for index, way in enumerate(ways):
        with suppress(LeverError):  # a module that cannot be tiled
            peaks[index] = peak_of(search, plain, way)
    best = min(peaks, key=peaks.__getitem__)
    way, peak = ways[best], peaks[best]
    if joining and "recompute" in levers and "offload" not in levers and peak > optimizer_peak(plain):
        return _joined(search, plain, way, peak)
    return way, peak


def peak_of(search: Search, plain: StepTrace, way: Way) -> int:
    """About the peak of a way, from one dry run of forward and backward."""
    part = search.tracer.part(_sized(search, way), way.policies, plain, way.joined)
    return max(part.peak_bytes, optimizer_peak(plain))


def as_it_will_run(search: Search, way: Way) -> StepTrace:
    """The whole step that way, optimizer and all."""
    return search.whole(_sized(search, way), dict(way.policies), way.joined)


def _sized(search: Search, way: Way) -> Combination:
    return replace(way.combination, micro_batches=search.counts()[-1])


def _frugal(search: Search, plain: StepTrace) -> Way:
    combination, levers = search.combinations(plain)[-1], search.request.levers
    if "compile" in levers and search.paths and not levers & {"recompute", "offload"}:
        return Way(compiled_alike(combination, search.paths)[-1], {})
    return Way(combination, dict.fromkeys(search.paths, frugal_policy(levers)))


def frugal_policy(levers: frozenset[str]) -> Policy:
    """What a block does at about its least."""
    if "offload" in levers:
        return INPUTS_ONLY if "recompute" in levers else OFFLOAD_ALL
    return RECOMPUTE_ALL if "recompute" in levers else KEEP_ALL


def _joined(search: Search, plain: StepTrace, way: Way, peak: int) -> tuple[Way, int]:
    """The way, with its blocks joined to as many segments as lower its peak most."""
    best, worse, paths = (way, peak), 0, search.paths
    for segments in segment_counts(len(paths)):
        ends = segment_ends(len(paths), segments)
        joined = replace(way, joined=tuple(path for i, path in enumerate(paths) if i not in ends))
        found = peak_of(search, plain, joined)
        best, worse = ((joined, found), 0) if found < best[1] else (best, worse + 1)
        if worse == WORSE_IN_A_ROW:
            break
    return best
