"""Streams weights of blocks, where a plan may: streamed bytes, recompute and offload are chosen under one budget.

The more blocks stream, the more of the device is left for activations, and the more bytes go over the link. So the
fastest step may stream more blocks than it must and recompute less, or the other way round. What blocks keep has the
same price whether weights stream or not: the blocks are priced once, with all weights on the device. For each number of
streamed blocks the chain is lowered by their bytes and solved, and the link's seconds are added. Few of these are
traced, the fastest first, and the trace decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tightfit.levers.stream import streamable_weights
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Solution, solve
from tightfit.planner.blocks.streamed import BlockSeconds, waiting_seconds
from tightfit.planner.levers import Combination, Role, Stream
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.search import Search
from tightfit.tracing.copies import STREAM
from tightfit.tracing.shapes import TensorShape

MISSES = 3  # numbers of streamed blocks that are tried, from the fewest that fit by arithmetic
TRACED = 3  # numbers of streamed blocks that are traced as applied, the fastest by prices first
NEAR = 0.002  # of a step: by how much a further one must be faster by prices to be traced


@dataclass(frozen=True)
class StreamedChoice:
    """Streamed blocks and a choice inside all blocks, as priced. `seconds` are those of a step."""

    setting: Stream
    priced: Priced
    solution: Solution
    seconds: float


def stream_blocks(search: Search) -> None:
    """Try streamed blocks beside the combinations that may profit: the plain one, and that of the least peak."""
    if not search.request.may(Stream) or not search.paths:
        return
    settings = Stream.settings(search.step())
    if not settings:
        return
    assert search.least is not None, "the plain step was traced"
    least = search.least.combination.without(*search.of_role(Role.WHOLE_BLOCKS), *search.of_role(Role.EXECUTION))
    for base in dict.fromkeys((search.request.plain, *_few_parts(search), least)):
        if not stream_as_priced(search, base, settings):
            stream_at_least(search, base, settings)


def _few_parts(search: Search) -> list[Combination]:
    """The combinations that split the batch no further."""
    parts = search.request.plain.micro_batches
    return [each for each in search.combinations() if each.micro_batches == parts]


def stream_as_priced(search: Search, base: Combination, settings: Sequence[Stream], *, most: int = TRACED) -> bool:
    """Trace the choices that are fastest by their prices, so many `most`. False if none of them fits."""
    fits = False
    choices = list(streamed_choices(search, base, settings))
    near = NEAR * min((choice.seconds for choice in choices), default=1.0)
    # Of about equal seconds the one that streams fewest comes first: it takes less of the host.
    found = sorted(choices, key=lambda choice: (round(choice.seconds / near), len(choice.setting.paths)))
    for choice in found[:most]:
        if search.best is not None and choice.seconds >= (1 - NEAR) * search.best.seconds:
            break
        best, search.best = search.best, None  # to see whether this one fits
        combination = base.with_lever(choice.setting)
        search.take_within(search.budget_bytes - UNSEEN_BYTES, combination, choice.priced, [])
        taken, search.best = search.best, best
        if taken is not None:
            fits = True
            search.consider(taken, str(taken.combination))
    return fits


def streamed_choices(search: Search, base: Combination, settings: Sequence[Stream]) -> Iterator[StreamedChoice]:
    """For each number of streamed blocks the fastest choices inside blocks that fit by their prices: with offload,
    where it is allowed, and without.
    """
    baseline = search.baseline(base)
    if baseline.priced is None or not baseline.priced.spans:
        return
    without = baseline.priced.in_memory()
    ways = [baseline.priced] if without.choices == baseline.priced.choices else [baseline.priced, without]
    sizes = block_bytes(search, settings[-1])
    for setting in settings:
        streamed = {path: sizes[path] for path in setting.paths}
        gone = sum(sorted(streamed.values())[: -room_for(search, setting)])
        for way in ways:
            priced = replace(way, chain=way.chain.lowered(gone))
            solution = solve(priced.chain, search.budget_bytes - UNSEEN_BYTES)
            if solution is not None:
                waits = waits_of(search, solution.choice, priced, streamed, setting)
                yield StreamedChoice(setting, priced, solution, baseline.seconds + solution.seconds + waits)


def block_bytes(search: Search, setting: Stream) -> dict[str, int]:
    """The bytes on the device of what streams of each block of a setting."""
    found = streamable_weights(search.request.model, setting.paths, trained=setting.trained)
    sizes = ({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in block} for block in found)
    return {path: sum(each.values()) for path, each in zip(setting.paths, sizes, strict=True)}


def room_for(search: Search, setting: Stream) -> int:
    """How many streamed blocks are on the device at a time."""
    return setting.ahead + 1 if search.request.device.kind == "cuda" else 1


def waits_of(
    search: Search, choice: Sequence[int], priced: Priced, streamed: Mapping[str, int], setting: Stream
) -> float:
    """The seconds of a step in which it waits for the link, with `streamed` bytes of blocks and this choice inside all
    blocks.
    """
    repeats = search.plain.loop_repeats

    def seconds(nbytes: int) -> float:
        return search.request.cost(STREAM, [TensorShape((nbytes,), (1,), torch.uint8)], [], ())

    blocks = []
    for place, (path, (forward, backward)) in enumerate(zip(priced.paths, priced.spans, strict=True)):
        options, taken = priced.chain.options[place], priced.choices[place][choice[place]]
        option = options[choice[place]]
        added = option.seconds / repeats
        replayed = min(added, taken.seconds)  # the rest is the recorder's, in forward
        fetched = seconds(options[0].kept_bytes - option.kept_bytes) if taken.policy.offloads else 0.0
        weights = seconds(streamed[path]) if path in streamed else None
        blocks.append(BlockSeconds(forward + added - replayed, backward + replayed, weights, fetched))
    in_parallel = search.request.device.kind == "cuda"
    waits = waiting_seconds(blocks, ahead=setting.ahead, room=room_for(search, setting), in_parallel=in_parallel)
    return repeats * waits


def stream_at_least(search: Search, base: Combination, settings: Sequence[Stream]) -> None:
    """Try every block at its least with all blocks streamed, then with as few as fit so.

    This needs no prices, and is tried where no choice fits by these.
    """
    kinds = search.of_role(Role.INSIDE_BLOCKS)
    frugal = [kind.frugal_policy(search.request.levers) for kind in kinds]
    policies = dict.fromkeys(search.paths, frugal[-1]) if frugal else {}
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
