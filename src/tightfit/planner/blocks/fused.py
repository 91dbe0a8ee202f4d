"""The options of blocks that PyTorch's compiler runs: what each keeps is the plan's choice, its code is the compiler's.

What is recomputed is fused with the kernels that read it, and costs next to nothing; products and attention take their
own time again. So the sets worth having differ from those of recorded blocks. Their bytes and seconds are read off dry
runs of the generated code.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tightfit.devices.families import Family, family_of
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.planner.blocks.captured import Captured
from tightfit.planner.blocks.frontier import BlockOperator, frontier, replay_cost
from tightfit.planner.blocks.graph import BlockGraph
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Option, least_peak, solve
from tightfit.planner.blocks.windows import Footprint, footprint, owning_blocks, windows
from tightfit.planner.levers import Choice
from tightfit.tracing.record import StepTrace

SETS = 12  # for each kind of block
ROUNDS = 3  # of compiling sets that a solution uses
AT_ONCE = 2  # sets of each kind in a round: those that most blocks use
FUSED = 0.02  # of its price alone, for an operator that is computed again within another kernel
_OWN_KERNEL = (Family.PRODUCT, Family.ATTENTION, Family.SORT, Family.SCAN, Family.SCATTER, None)

Tracer = Callable[[Mapping[str, Policy]], StepTrace]  # runs the step dry, with these blocks compiled


@dataclass(frozen=True)
class FusedPrices:
    """The blocks of a step with the options of recorded blocks, then those of captured ones, then of compiled ones.

    `solved` has the seconds by which options differ. Those of `shown` are of recomputing alone.
    """

    solved: Priced
    shown: Priced
    recorded: tuple[int, ...]  # for each block, how many options are of recorded blocks
    first: tuple[int, ...]  # for each block, the index of its first compiled option
    base: tuple[float, ...]  # for each block, its seconds with an option that `solved` says adds none
    offered: Mapping[str, Sequence[int]]  # for each kind, the sets that its compiled options are

    def compiled(self, choice: Sequence[int]) -> tuple[str, ...]:
        """The blocks that a choice compiles."""
        chosen = zip(self.solved.paths, choice, self.first, strict=True)
        return tuple(path for path, index, first in chosen if index >= first)

    def captured(self, choice: Sequence[int]) -> tuple[str, ...]:
        """The blocks that a choice captures."""
        chosen = zip(self.solved.paths, choice, self.recorded, self.first, strict=True)
        return tuple(path for path, index, recorded, first in chosen if recorded <= index < first)

    def without_captured(self, paths: Collection[str]) -> "FusedPrices":
        """The same prices without the options of captured blocks at these paths."""
        spans = [
            slice(recorded, first if path in paths else recorded)
            for path, recorded, first in zip(self.solved.paths, self.recorded, self.first, strict=True)
        ]
        return replace(
            self,
            solved=_without(self.solved, spans),
            shown=_without(self.shown, spans),
            first=tuple(first - (span.stop - span.start) for first, span in zip(self.first, spans, strict=True)),
        )

    def corrected(self, trace: StepTrace, choice: Sequence[int]) -> "FusedPrices":
        """The same prices with the seconds of captured blocks as a trace of a choice shows them, for each kind."""
        taken, captured = _seconds_of_blocks(trace, self.solved.paths), set(self.captured(choice))
        apart: dict[str, list[float]] = {}
        for place, path in enumerate(self.solved.paths):
            if path in captured:
                expected = self.base[place] + self.solved.chain.options[place][choice[place]].seconds
                apart.setdefault(self.solved.graphs[place].kind, []).append(taken[path] - expected)
        options = []
        for place, mine in enumerate(self.solved.chain.options):
            found = apart.get(self.solved.graphs[place].kind, [0.0])
            more, span = sum(found) / len(found), range(self.recorded[place], self.first[place])
            options.append(
                tuple(replace(each, seconds=each.seconds + more * (index in span)) for index, each in enumerate(mine))
            )
        return replace(self, solved=replace(self.solved, chain=replace(self.solved.chain, options=tuple(options))))


def _without(priced: Priced, spans: Sequence[slice]) -> Priced:
    """The same blocks without some of the options of each."""
    options = zip(priced.chain.options, spans, strict=True)
    choices = zip(priced.choices, spans, strict=True)
    chain = replace(priced.chain, options=tuple((*mine[: s.start], *mine[s.stop :]) for mine, s in options))
    return replace(priced, chain=chain, choices=tuple((*mine[: s.start], *mine[s.stop :]) for mine, s in choices))


def estimated(priced: Priced) -> Priced:
    """The options of recorded blocks with about the seconds that they would take in compiled code."""
    options = []
    for mine, choices, graph in zip(priced.chain.options, priced.choices, priced.graphs, strict=True):
        operations = _fused(graph)
        shares = [_cost(operations, graph, choice.policy)[1] / (choice.seconds or 1.0) for choice in choices]
        pairs = zip(mine, shares, strict=True)
        options.append(tuple(replace(option, seconds=option.seconds * share) for option, share in pairs))
    return replace(priced, chain=replace(priced.chain, options=tuple(options)))


def price_fused(
    priced: Priced, trace: Tracer, plain: StepTrace, bound: int, captured: Captured | None = None
) -> FusedPrices:
    """Add the options of compiled blocks to those of a step whose blocks run one after the other.

    With `captured`, each recorded option that copies nothing to the host is one of a captured block too.

    The compiler takes a second or more for each set. So sets are guessed first, from those nearest to them, and only
    what a solution within `bound` uses is compiled, until a solution guesses nothing. `plain` is the whole step with no
    lever.
    """
    kinds = {graph.kind: graph for graph in priced.graphs}
    eager = _seconds_of_blocks(plain, priced.paths)
    compiled_sets = {}
    for kind, graph in kinds.items():
        place = priced.graphs.index(graph)
        recorded = (priced.chain.options[place], priced.choices[place], eager[graph.path])
        compiled_sets[kind] = _CompiledSets.of(graph, *recorded, plain.loop_repeats)
    for number in range(ROUNDS + 1):
        # Captured options would beat guesses, which are too slow, and the best sets would never be compiled.
        prices = _prices(priced, compiled_sets, eager, None, guesses=number < ROUNDS)
        solution = solve(prices.solved.chain, bound) or least_peak(prices.solved.chain)
        guessed: dict[str, Counter[int]] = {kind: Counter() for kind in kinds}
        for place, index in enumerate(solution.choice):
            kind = priced.graphs[place].kind
            if index >= prices.first[place]:
                found = prices.offered[kind][index - prices.first[place]]
                guessed[kind][found] += found not in compiled_sets[kind].measured
        wanted = {
            kind: [found for found, count in counts.most_common(AT_ONCE) if count] for kind, counts in guessed.items()
        }
        if not any(wanted.values()):
            break
        _measure(priced, compiled_sets, wanted, trace)
    return _prices(priced, compiled_sets, eager, captured, guesses=False)


@dataclass
class _CompiledSets:
    """The sets of one kind of block. Mutable: what dry runs have shown of them, by index."""

    choices: list[Choice]
    kept_bytes: list[int]  # by the graph, for comparison with each other
    nearest: list[tuple[int, float, Footprint, float]]  # bytes and seconds by the graph, and what was seen
    measured: dict[int, tuple[Footprint, float]]
    repeats: int

    @classmethod
    def of(
        cls, graph: BlockGraph, options: Sequence[Option], choices: Sequence[Choice], eager: float, repeats: int
    ) -> "_CompiledSets":
        operations = _fused(graph)
        sets = graph.alike_for_experts(frontier(operations, limit=SETS), operations)
        offered = [Choice(Policy(graph.kept_keys(each.kept)), each.replay_seconds) for each in sets]
        seen = []
        for option, choice in zip(options, choices, strict=True):
            kept, seconds = _cost(operations, graph, choice.policy)
            print_ = Footprint(option.kept_bytes, option.forward_bytes, option.backward_bytes)
            seen.append((kept, seconds, print_, eager + seconds * repeats))
        return cls(offered, [each.kept_bytes for each in sets], seen, {}, repeats)

    def note(self, index: int, print_: Footprint, seconds: float) -> None:
        if not self.measured:
            self.nearest.clear()  # of recorded blocks
        self.measured[index] = print_, seconds
        self.nearest.append((self.kept_bytes[index], self.choices[index].seconds, print_, seconds))

    def price(self, index: int) -> tuple[Footprint, float]:
        """The cost of a set, measured or guessed: as the nearest one that was seen, with the bytes between them."""
        if index in self.measured:
            return self.measured[index]
        kept, again = self.kept_bytes[index], self.choices[index].seconds
        own, own_again, print_, seconds = min(self.nearest, key=lambda seen: abs(seen[0] - kept))
        more = kept - own
        guess = Footprint(print_.kept_bytes + more, print_.forward_bytes + more, print_.backward_bytes + max(0, more))
        return guess, seconds + (again - own_again) * self.repeats


def _prices(
    priced: Priced,
    compiled_sets: Mapping[str, _CompiledSets],
    eager: Mapping[str, float],
    captured: Captured | None,
    *,
    guesses: bool,
) -> FusedPrices:
    """The prices of all blocks, with the sets that were seen, or with all."""
    offered = {
        kind: list(range(len(mine.choices))) if guesses else sorted(mine.measured)
        for kind, mine in compiled_sets.items()
    }
    solved, shown, choices, firsts, base = [], [], [], [], []
    for place, path in enumerate(priced.paths):
        kind = priced.graphs[place].kind
        recorded, mine = priced.chain.options[place], compiled_sets[kind]
        programs = () if captured is None else captured.of(place)
        compiled, alone = [], []
        for index in offered[kind]:
            print_, taken = mine.price(index)
            bytes_ = print_.kept_bytes, print_.forward_bytes, print_.backward_bytes
            compiled.append(Option(*bytes_, taken - eager[path]))
            alone.append(Option(*bytes_, mine.choices[index].seconds * mine.repeats))
        every = (*recorded, *(program.option for program in programs), *compiled)
        least = min(option.seconds for option in every)
        solved.append(tuple(replace(option, seconds=option.seconds - least) for option in every))
        shown.append((*recorded, *(program.shown for program in programs), *alone))
        as_programs = (program.choice for program in programs)
        choices.append((*priced.choices[place], *as_programs, *(mine.choices[index] for index in offered[kind])))
        firsts.append(len(recorded) + len(programs))
        base.append(eager[path] + least)
    again = replace(priced, choices=tuple(choices))
    return FusedPrices(
        replace(again, chain=replace(priced.chain, options=tuple(solved))),
        replace(again, chain=replace(priced.chain, options=tuple(shown))),
        tuple(map(len, priced.chain.options)),
        tuple(firsts),
        tuple(base),
        offered,
    )


def _fused(graph: BlockGraph) -> tuple[BlockOperator, ...]:
    """The operations of a block with the seconds of computing them again in compiled code."""
    return tuple(
        operation if family_of(key.name) in _OWN_KERNEL else replace(operation, seconds=FUSED * operation.seconds)
        for operation, key in zip(graph.operations, graph.keys, strict=True)
    )


def _cost(operations: Sequence[BlockOperator], graph: BlockGraph, policy: Policy) -> tuple[int, float]:
    """The bytes that a policy keeps, and the seconds of computing the rest again in compiled code."""
    kept = frozenset(place for place, key in enumerate(graph.keys) if policy == KEEP_ALL or key in policy.kept)
    held, seconds, _ = replay_cost(operations, kept)
    return held, seconds


def _measure(
    priced: Priced, compiled_sets: Mapping[str, _CompiledSets], wanted: Mapping[str, Collection[int]], trace: Tracer
) -> None:
    """Note the footprints of these sets, and the seconds of a block that runs so, from as few traces as the number of
    blocks allows.
    """
    members = {kind: [g.path for g in priced.graphs if g.kind == kind] for kind in compiled_sets}
    waiting = {kind: sorted(indices) for kind, indices in wanted.items()}
    while any(waiting.values()):
        tried: dict[str, tuple[_CompiledSets, int]] = {}
        for kind, indices in waiting.items():
            now, waiting[kind] = indices[: len(members[kind])], indices[len(members[kind]) :]
            tried |= {path: (compiled_sets[kind], index) for path, index in zip(members[kind], now, strict=False)}
        applied = trace({path: mine.choices[index].policy for path, (mine, index) in tried.items()})
        taken = _seconds_of_blocks(applied, priced.paths)
        for window in windows(applied, priced.paths):
            if window.path in tried:
                mine, index = tried[window.path]
                mine.note(index, footprint(applied, window), taken[window.path])


def _seconds_of_blocks(trace: StepTrace, paths: Sequence[str]) -> dict[str, float]:
    """The seconds that each block takes in forward and backward of a step, in all of its micro-batches."""
    owners = owning_blocks(trace, paths)
    found = dict.fromkeys(paths, 0.0)
    for operator in trace.operators[slice(*trace.repeated)]:
        path = owners[operator.call]
        if path is not None:
            found[path] += operator.seconds * trace.loop_repeats
    return found
