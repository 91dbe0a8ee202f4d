"""Streams weights of blocks, where a plan may: as many blocks as the budget requires, or as is fastest."""

import math
from collections.abc import Sequence

from tightfit.planner.levers import Combination, Role, Stream
from tightfit.planner.search.bisection import halved
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.search import Search

MISSES = 3  # numbers of streamed blocks that are tried, from the fewest that fit by arithmetic
HALVINGS = 2  # numbers of streamed blocks that are tried between the fewest that fit and all


def stream_blocks(search: Search) -> None:
    """Try streamed blocks beside the combinations that may profit: the plain one, and that of the least peak.

    The fewer blocks stay on the device, the more of it is left for activations, and the more bytes go over the link. A
    choice between is traced as applied: the fewest streamed blocks that fit, all, and two halves of the way between.
    """
    if not search.request.may(Stream) or not search.paths:
        return
    settings = Stream.settings(search.step())
    if not settings:
        return
    assert search.least is not None, "the plain step was traced"
    least = search.least.combination.without(*search.of_role(Role.WHOLE_BLOCKS), *search.of_role(Role.EXECUTION))
    for base in dict.fromkeys((search.request.plain, *_few_parts(search), least)):
        _stream(search, base, settings)


def _few_parts(search: Search) -> list[Combination]:
    """The combinations that split the batch no further."""
    parts = search.request.plain.micro_batches
    return [each for each in search.combinations() if each.micro_batches == parts]


def _stream(search: Search, base: Combination, settings: Sequence[Stream]) -> None:
    """Try numbers of streamed blocks in one combination of the other levers."""
    solved: dict[int, float] = {}

    def seconds(count: int) -> float:
        """The seconds of the best choice with so many streamed blocks; infinite if none fits."""
        if count not in solved:
            best, search.best = search.best, None  # the fastest so far bounds no choice with other streamed blocks
            search.solve_blocks(base.with_lever(settings[count - 1]))
            found, search.best = search.best, best
            solved[count] = math.inf if found is None else found.seconds
            if found is not None:
                search.consider(found, str(found.combination))
        return solved[count]

    high = len(settings)
    if seconds(high) == math.inf:
        stream_at_least(search, base, settings)
        return
    low = fewest(search, base, settings)
    if seconds(low) == math.inf:  # of so few, the ones that are on the device together take as much
        low = high - halved(lambda resident: seconds(high - resident) < math.inf, 0, high - low)
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        if middle in (low, high):
            return
        seconds(middle)
        if seconds(high) < seconds(low):
            low = middle
        else:
            high = middle


def stream_at_least(search: Search, base: Combination, settings: Sequence[Stream]) -> None:
    """Try every block at its least with all blocks streamed, then with as few as fit so.

    Weights that come and go disturb the prices of what a block keeps, and this needs none.
    """
    kinds = search.of_role(Role.INSIDE_BLOCKS)
    if not kinds:
        return
    policies = dict.fromkeys(search.paths, kinds[-1].frugal_policy(search.request.levers))

    most, fitting = settings[-1], []
    everything = search.trace_applied(base.with_lever(most), policies)
    room = search.budget_bytes - everything.needed_bytes
    if (there := search.room(everything.trace)) is not None:  # segments and context are on the device too
        room = min(room, search.device_bytes - there.reserved_bytes - there.context_bytes)
    for setting in [each for each in settings if most.bytes - each.bytes <= room][:MISSES]:
        fitting.append(search.trace_applied(base.with_lever(setting), policies))
        if search.excess(fitting[-1]) <= 0:
            break
    for candidate in (*fitting[-1:], everything):  # of equal seconds the first one stays
        search.consider(candidate, str(candidate.combination))


def fewest(search: Search, base: Combination, settings: Sequence[Stream]) -> int:
    """The fewest streamed blocks that may fit: all streamed at their least, and as many back as the rest takes."""
    baseline = search.baseline(base.with_lever(settings[-1]))
    room = search.budget_bytes - UNSEEN_BYTES - baseline.least_bytes
    back = (count for count, each in enumerate(settings, start=1) if settings[-1].bytes - each.bytes <= room)
    return next(back, len(settings))  # a trace as applied may fit where the sum does not
