"""Tries what is slow and needs least memory, where nothing else fits: tiles, then blocks joined to segments."""

import math

from tightfit.errors import LeverError
from tightfit.levers.recompute.rule import every_block
from tightfit.planner.levers import Recompute, Role
from tightfit.planner.records import Rejected
from tightfit.planner.search.search import Search


def try_last_resorts(search: Search) -> None:
    """Add the last-resort levers to the combination of least peak, one setting at a time, until one fits."""
    assert search.least is not None, "the plain step was traced"
    # Solving puts recompute on blocks, which compiled blocks refuse (RECOMPUTE_AND_COMPILED_BLOCKS).
    least = search.least.combination.without(*search.of_role(Role.WHOLE_BLOCKS), *search.of_role(Role.EXECUTION))
    for kind in search.of_role(Role.LAST):
        for setting in kind.settings(search.step()):
            if search.is_held_by_update:
                return
            combination = least.with_lever(setting)
            try:
                search.solve_blocks(combination)
            except LeverError as error:  # a module whose input is not one tensor (B, T, n) cannot be tiled
                search.rejected.append(Rejected(str(combination), str(error)))
                break
            if search.best is not None:
                return


def join_segments(search: Search) -> None:
    """Join blocks to segments, which also recompute the blocks' outputs. That is slower, and needs less memory in
    models of many blocks.
    """
    if not search.request.may(Recompute) or not search.paths or search.least is None or search.joinable is None:
        return
    world = search.request.world
    if world is not None and world.is_sharded and world.sharding.reshard_after_forward is not False:
        return  # a segment recomputes several blocks at once, and FSDP2 has gathered the weights of one
    if search.is_held_by_update:
        return
    # That of least peak may capture blocks, and without these it may be above another one, with tiles.
    combination = search.joinable.combination
    for segments in segment_counts(len(search.paths)):
        rule = every_block(search.paths, segments=segments)
        part = search.tracer.part(combination, rule.policies, search.plain, rule.joined)
        if part.peak_bytes >= search.least.peak_bytes:
            continue  # the trace of a part suffices to see that this is no gain, and costs less than a whole step
        search.consider(
            search.trace_applied(combination, rule.policies, joined=rule.joined),
            f"{combination}, {segments} segments",
        )
        if search.best is not None:
            return


def segment_counts(blocks: int) -> list[int]:
    """The numbers of segments worth a trace, largest first.

    For each possible length of the longest segment, that is the smallest number of segments. More segments of the same
    greatest length would keep more outputs and lower no segment's own peak.
    """
    return sorted({math.ceil(blocks / length) for length in range(2, blocks + 1)}, reverse=True)
