"""Chooses which outputs a block keeps if only memory counts: bytes kept against the peak of the block's backward.

The frontier trades bytes for seconds, so the sets that it finds depend on prices. A set that keeps one more value, at
the place where the replay would otherwise fill memory, can be on that hull on one device and off it on another. The
least peak of a step must not depend on that. Here nothing has a price. The levels of a backward under any keep set
follow from the levels of the step without recomputation: subtract the outputs of the block's operators, and add each
one again from where it is kept or replayed until autograd frees it. The search starts with nothing kept. It keeps or
drops one value at a time, and follows every set that no other one equals or beats in both costs.

The sets are proposals: their bytes are measured on traces, as for every other option.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from tightfit.planner.blocks.graph import BlockGraph, key_of
from tightfit.planner.blocks.windows import BlockWindow
from tightfit.tracing.record import Phase, StepTrace

FRUGAL_SETS = 4
SEARCH_WORK = 100_000  # operators visited in one search, about 0.1 s; usual blocks need a tenth of it
LAST = 1 << 60  # sorts the backward operator itself after every operator replayed right before it


class _Moment(NamedTuple):
    """A moment in a block's backward: the replay of operation `place` right before backward operator `time`. With
    `place` = `LAST`, that backward operator itself.
    """

    time: int
    place: int


@dataclass(frozen=True)
class _Output:
    """The output of one operator of a block's forward.

    `place` is its place in the graph. `inputs` are indices into the list of outputs. `uses` are autograd's uses: the
    first backward operator that reads it, and the one after which it is freed.
    """

    place: int
    bytes: int
    inputs: tuple[int, ...]
    uses: tuple[_Moment, ...]
    pinned: bool


@dataclass(frozen=True)
class Backward:
    """A block's backward without the outputs of its own forward: `starts` and `levels` of each operator, in bytes."""

    outputs: tuple[_Output, ...]
    starts: tuple[int, ...]
    levels: tuple[int, ...]

    def cost(self, kept: frozenset[int]) -> tuple[int, int]:
        """(bytes kept until backward, highest level of the backward) of a keep set, by places in the graph."""
        uses = [list(output.uses) for output in self.outputs]
        replayed: dict[int, _Moment] = {}
        kept_bytes = 0
        # Readers come after their inputs, so by then all uses of an output are known, those by replays included.
        for index in range(len(uses) - 1, -1, -1):
            output = self.outputs[index]
            if not uses[index]:
                continue
            if output.pinned or output.place in kept:
                kept_bytes += output.bytes
                continue
            replayed[index] = _Moment(min(uses[index]).time, index)
            for source in output.inputs:
                uses[source].append(replayed[index])
        return kept_bytes, max(self._levels(uses, replayed), default=0)

    def _levels(self, uses: list[list[_Moment]], replayed: dict[int, _Moment]) -> Iterator[int]:
        moments = sorted([*(_Moment(time, LAST) for time in range(len(self.levels))), *replayed.values()])
        order = {moment: place for place, moment in enumerate(moments)}
        base = [(self.levels if m.place == LAST else self.starts)[m.time] for m in moments]
        changes = [0] * (len(moments) + 1)
        for index, output in enumerate(self.outputs):
            if uses[index] and output.bytes:
                # Kept: there from the first moment. Replayed: from its replay on. Both until the last use.
                changes[order[replayed[index]] if index in replayed else 0] += output.bytes
                changes[order[max(uses[index])] + 1] -= output.bytes
        return (level + own for level, own in zip(base, accumulate(changes), strict=False))


def frugal_sets(trace: StepTrace, graph: BlockGraph, window: BlockWindow) -> tuple[frozenset[int], ...]:
    """At most `FRUGAL_SETS` keep sets, by places in the graph, from the fewest bytes kept to the lowest backward.

    `trace` is a step in which the block keeps everything.
    """
    best = _search(foreseen(trace, graph, window))
    count = min(FRUGAL_SETS, len(best))
    return tuple(best[step * (len(best) - 1) // max(1, count - 1)] for step in range(count))


def foreseen(trace: StepTrace, graph: BlockGraph, window: BlockWindow) -> Backward:
    """The backward of a block, from a trace in which it keeps everything; `cost` then prices any keep set."""
    begin, end = window.backward
    places = _places(trace, graph, window)
    starts, levels = list(trace.starts[begin:end]), list(trace.levels[begin:end])
    own = {s for index, place in places.items() if graph.operations[place].bytes for s in _storages(trace, index)}
    for storage in (trace.storages[number] for number in own):
        for time in range(end - begin if storage.died is None else min(end, storage.died) - begin):
            starts[time] -= storage.bytes
            levels[time] -= storage.bytes
    return Backward(_outputs(trace, graph, window, places), tuple(starts), tuple(levels))


def _search(backward: Backward) -> list[frozenset[int]]:
    """The sets that no other set found equals or beats in both costs, in order of bytes kept."""
    sizes = {output.place: output.bytes for output in backward.outputs if not output.pinned}
    largest_first = sorted(sizes, key=lambda place: (-sizes[place], place))
    # The largest outputs come first, so if the work runs out, only sets with small outputs are missing.
    left = SEARCH_WORK // (len(backward.outputs) + len(backward.levels))
    costs = {frozenset[int](): backward.cost(frozenset())}
    followed: set[frozenset[int]] = set()
    while waiting := [kept for kept in _undominated(costs) if kept not in followed]:
        followed.update(waiting)
        for changed in (kept ^ {place} for kept in waiting for place in largest_first):
            if changed not in costs and len(costs) <= left:
                costs[changed] = backward.cost(changed)
    return _undominated(costs)


def _undominated(costs: dict[frozenset[int], tuple[int, int]]) -> list[frozenset[int]]:
    found: list[frozenset[int]] = []
    for kept in sorted(costs, key=lambda kept: (*costs[kept], sorted(kept))):
        if not found or costs[kept][1] < costs[found[-1]][1]:
            found.append(kept)
    return found


def _places(trace: StepTrace, graph: BlockGraph, window: BlockWindow) -> dict[int, int]:
    """The operators of the block's forward, in all of its calls, with their places in the graph."""
    place_of = {key: place for place, key in enumerate(graph.keys)}
    found = {}
    for index in range(*window.forward):
        operator = trace.operators[index]
        key = key_of(operator)
        if operator.region == graph.path and operator.phase is Phase.FORWARD and key in place_of:
            found[index] = place_of[key]
    return found


def _outputs(
    trace: StepTrace, graph: BlockGraph, window: BlockWindow, places: Mapping[int, int]
) -> tuple[_Output, ...]:
    begin, end = window.backward
    order = {index: number for number, index in enumerate(places)}
    first_read: dict[int, int] = {}
    for time in range(end - 1, begin - 1, -1):
        first_read.update(dict.fromkeys(trace.operators[time].reads, time - begin))
    outputs = []
    for index, place in places.items():
        producers = (trace.values[value].operator for value in trace.operators[index].reads)
        uses = []
        for value in trace.operators[index].makes:
            if value in first_read:
                died = trace.storages[trace.values[value].storage].died
                let_go = end - begin if died is None else min(end, died) - begin
                uses += [_Moment(first_read[value], LAST), _Moment(max(first_read[value], let_go - 1), LAST)]
        operation = graph.operations[place]
        inputs = tuple(sorted({order[p] for p in producers if p in order and p < index}))
        outputs.append(_Output(place, operation.bytes, inputs, tuple(uses), operation.pinned))
    return tuple(outputs)


def _storages(trace: StepTrace, index: int) -> set[int]:
    return {trace.values[value].storage for value in trace.operators[index].makes}
