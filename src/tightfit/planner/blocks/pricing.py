"""Prices a model's blocks: finds the options worth having for each kind, and measures their bytes on traces as applied.

Bytes are never derived from a rule. Each option is applied to some block of its kind, several at a time. A dry run of
the model with these options gives the bytes that each keeps and the peaks of its forward and backward.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from torch import nn

from tightfit.levers.recompute import KEEP_ALL, OperatorKey, Policy
from tightfit.planner.blocks.frontier import KeepSet, frontier, keep_set
from tightfit.planner.blocks.frugal import frugal_sets
from tightfit.planner.blocks.graph import BlockGraph, block_graph
from tightfit.planner.blocks.solve import Chain, Option
from tightfit.planner.blocks.windows import BlockWindow, Footprint, calls_of, footprint, is_chain, level_at, windows
from tightfit.planner.levers import Choice, Lever, Recompute
from tightfit.tracing.record import StepTrace, highest
from tightfit.tracing.recording import NO_EXECUTOR_COST, ExecutorCost

MANY_BLOCKS = 12  # of a chain, whose choices together are fine enough with a few options for each
FEW_TRACES = 4  # for all options of a kind in such a chain

Tracer = Callable[[Mapping[str, Policy]], StepTrace]  # runs the step dry with these policies applied


@dataclass(frozen=True)
class _Kind:
    """A kind of block as levers that work inside blocks see it (the protocol `levers.BlockKind`).

    `frugal` are the keep sets of least memory at any price, by places in the graph. `most` bounds the other keep sets.
    """

    graph: BlockGraph
    frugal: Sequence[frozenset[int]]
    most: int | None = None

    def keep_sets(self, limit: int) -> list[KeepSet]:
        operations = self.graph.operations
        limit = limit if self.most is None else min(limit, self.most)
        sets = [*frontier(operations, limit=limit), *(keep_set(operations, kept) for kept in self.frugal)]
        return list(dict.fromkeys(self.graph.alike_for_experts(sets, operations)))

    def keys(self, places: frozenset[int]) -> frozenset[OperatorKey]:
        return self.graph.kept_keys(places)

    def pinned(self, places: frozenset[int]) -> frozenset[int]:
        return frozenset(place for place in places if self.graph.operations[place].pinned)


@dataclass(frozen=True)
class Priced:
    """The blocks of a model in forward order, their options, and the chain to solve.

    `spans` are the seconds of each block's forward and backward with nothing recomputed, in one micro-batch. They are
    empty where the blocks do not run one after the other.
    """

    paths: tuple[str, ...]
    graphs: tuple[BlockGraph, ...]
    choices: tuple[tuple[Choice, ...], ...]
    chain: Chain
    spans: tuple[tuple[float, float], ...] = ()

    def policies(self, choice: Sequence[int]) -> dict[str, Policy]:
        """The policies of a solution, without the blocks that keep everything: these run unobserved."""
        chosen = {path: self.choices[i][choice[i]].policy for i, path in enumerate(self.paths)}
        return {path: policy for path, policy in chosen.items() if policy != KEEP_ALL}

    def in_memory(self) -> "Priced":
        """The same blocks without the options that offload."""
        stays = [[not choice.policy.offloads for choice in choices] for choices in self.choices]
        choices = tuple(tuple(compress(mine, kept)) for mine, kept in zip(self.choices, stays, strict=True))
        options = tuple(tuple(compress(mine, kept)) for mine, kept in zip(self.chain.options, stays, strict=True))
        return replace(self, choices=choices, chain=replace(self.chain, options=options))


def price(
    model: nn.Module,
    paths: Sequence[str],
    trace: Tracer,
    *,
    fixed_bytes: int,
    levers: Sequence[type[Lever]],
    executor: ExecutorCost = NO_EXECUTOR_COST,
    in_parallel: bool = False,
    shifted: bool = False,
) -> Priced:
    """Price the blocks at `paths`.

    `fixed_bytes` is the highest level that no choice changes (the optimizer's). `levers` may be used inside blocks.
    `executor` says what it takes itself for each operator. `in_parallel` says that copies run in parallel with the
    computation. `shifted` says that blocks of one kind differ in what others allocate and free meanwhile, such as the
    gathered weights of their neighbours.
    """
    plain = trace(dict.fromkeys(paths, KEEP_ALL))
    in_turn = is_chain(plain, paths)
    spans = windows(plain, paths)
    found = {w.path: block_graph(plain, model, w.path, executor) for w in spans}
    graphs = {path: graph for path, graph in found.items() if graph is not None}
    spans = tuple(w for w in spans if w.path in graphs)
    order = [w.path for w in spans]
    kinds = {graphs[window.path].kind: window for window in spans}
    frugal = {
        # The search for frugal sets reads the levels of one block's backward, which other blocks must not interrupt.
        kind: frugal_sets(plain, graphs[window.path], window) if Recompute in levers and in_turn else ()
        for kind, window in kinds.items()
    }
    # Each block tries one option in a trace, so a kind of one block (all of a UNet's) has a trace for each of its own.
    counts = Counter(graphs[path].kind for path in order)
    most = {kind: FEW_TRACES * count if len(order) >= MANY_BLOCKS else None for kind, count in counts.items()}
    by_kind = {kind: _choices(_Kind(graphs[w.path], frugal[kind], most[kind]), levers) for kind, w in kinds.items()}
    choices = tuple(by_kind[graphs[p].kind] for p in order)
    if not in_turn:
        # A step that calls its blocks twice (R-drop, a siamese encoder) interleaves their windows, so no single block's
        # bytes can be read off. Each option is then priced by its effect on the peak when all blocks of a kind use it.
        members = {kind: [p for p in order if graphs[p].kind == kind] for kind in by_kind}
        priced = {kind: _apart(members[kind], by_kind[kind], plain, trace) for kind in by_kind}
        chain = _heap(plain, [priced[graphs[p].kind] for p in order], fixed_bytes)
        return Priced(tuple(order), tuple(graphs[p] for p in order), choices, chain)
    calls = {path: calls_of(plain, path) for path in order}  # a graph holds one call, and each call is replayed
    plain_prints = {w.path: footprint(plain, w) for w in spans}
    alike = [[path for path in order if graphs[path].kind == kind] for kind in kinds]
    shifts = _shifts(alike, plain_prints) if shifted else dict.fromkeys(order, Footprint(0, 0, 0))
    measured = _measure(order, graphs, by_kind, plain_prints, trace, in_parallel, shifts)
    options = tuple(
        tuple(
            Option(
                f.kept_bytes + shifts[path].kept_bytes,
                f.forward_bytes + shifts[path].forward_bytes,
                f.backward_bytes + shifts[path].backward_bytes,
                (choice.seconds * calls[path] + f.lever_seconds) * plain.loop_repeats,
            )
            for f, choice in zip(measured[graphs[path].kind], by_kind[graphs[path].kind], strict=True)
        )
        for path in order
    )
    chain = _chain(plain, spans, options, plain_prints, fixed_bytes)
    return Priced(tuple(order), tuple(graphs[p] for p in order), choices, chain, _seconds(plain, spans))


def _seconds(trace: StepTrace, spans: Sequence[BlockWindow]) -> tuple[tuple[float, float], ...]:
    """The seconds of each block's forward and backward."""
    both = ((trace.operators[slice(*w.forward)], trace.operators[slice(*w.backward)]) for w in spans)
    return tuple((sum(o.seconds for o in forward), sum(o.seconds for o in backward)) for forward, backward in both)


def _choices(kind: _Kind, levers: Sequence[type[Lever]]) -> tuple[Choice, ...]:
    """Keeping everything, then the options of each lever that works inside blocks."""
    allowed = frozenset(lever.name for lever in levers)
    options = (option for lever in levers for option in lever.options(kind, allowed))
    return (Choice(KEEP_ALL, 0.0), *options)


def _shifts(alike: Sequence[Sequence[str]], plain: Mapping[str, Footprint]) -> dict[str, Footprint]:
    """How the footprint of each block differs from that of the middle one of its kind, by what others do meanwhile."""
    middle = {path: plain[paths[len(paths) // 2]] for paths in alike for path in paths}
    return {path: _difference(plain[path], middle[path]) for path in middle}


def _difference(one: Footprint, other: Footprint) -> Footprint:
    return replace(
        one,
        kept_bytes=one.kept_bytes - other.kept_bytes,
        forward_bytes=one.forward_bytes - other.forward_bytes,
        backward_bytes=one.backward_bytes - other.backward_bytes,
    )


def _measure(
    order: Sequence[str],
    graphs: Mapping[str, BlockGraph],
    by_kind: Mapping[str, tuple[Choice, ...]],
    plain: Mapping[str, Footprint],
    trace: Tracer,
    in_parallel: bool,
    shifts: Mapping[str, Footprint],
) -> dict[str, list[Footprint]]:
    """The footprint of every option of every kind, from as few traces as the number of blocks allows."""
    # Blocks of one kind try different options in the same trace, so a few traces price all options.
    members = {kind: [p for p in order if graphs[p].kind == kind] for kind in by_kind}
    measured = {kind: [_difference(plain[members[kind][0]], shifts[members[kind][0]])] for kind in by_kind}
    while any(len(measured[kind]) < len(by_kind[kind]) for kind in by_kind):
        policies, tried = {}, {}
        for kind, choices in by_kind.items():
            waiting = range(len(measured[kind]), len(choices))
            for path, option in zip(members[kind], waiting, strict=False):
                policies[path], tried[path] = choices[option].policy, kind
        applied = trace(policies)
        for window in windows(applied, order):
            if window.path in tried:
                found = footprint(applied, window, in_parallel=in_parallel)
                measured[tried[window.path]].append(_difference(found, shifts[window.path]))
    return measured


def _chain(
    plain: StepTrace,
    spans: Sequence[BlockWindow],
    options: tuple[tuple[Option, ...], ...],
    prints: Mapping[str, Footprint],
    fixed_bytes: int,
) -> Chain:
    """The chain of the blocks: the levels around them in the plain step, less the bytes that earlier blocks keep."""
    kept = 0
    forward_base, backward_base = [], []
    for window in spans:
        forward_base.append(level_at(plain, window.forward[0]) - kept)
        backward_base.append(level_at(plain, window.backward[1]) - kept)
        kept += prints[window.path].kept_bytes
    if not spans:
        return Chain((), (), (), plain.peak_bytes, fixed_bytes)
    first, last = plain.repeated
    middle = highest(plain.levels, spans[-1].forward[1], spans[-1].backward[0]) - kept
    ends = [*plain.levels[first : spans[0].forward[0]], *plain.levels[spans[0].backward[1] : last]]
    return Chain(options, tuple(forward_base), tuple(backward_base), middle, max([fixed_bytes, *ends]))


def _apart(paths: Sequence[str], choices: Sequence[Choice], plain: StepTrace, trace: Tracer) -> tuple[Option, ...]:
    """The options of blocks of one kind that do not run one after the other.

    Each block's share of the saved peak and of the added seconds is that of all blocks together, divided by their
    number. The highest points of single blocks are unknown, so they are left at zero.
    """
    applied = [plain, *(trace(dict.fromkeys(paths, choice.policy)) for choice in choices[1:])]
    saved = [(plain.peak_bytes - one.peak_bytes) // len(paths) for one in applied]
    added = [max(0.0, one.step_seconds - plain.step_seconds) / len(paths) for one in applied]
    return tuple(Option(max(saved) - mine, 0, 0, seconds) for mine, seconds in zip(saved, added, strict=True))


def _heap(plain: StepTrace, options: Sequence[tuple[Option, ...]], fixed_bytes: int) -> Chain:
    """A chain whose peak is the plain peak less the bytes that the choices save."""
    nowhere = (0,) * len(options)
    kept = sum(mine[0].kept_bytes for mine in options)
    return Chain(tuple(options), nowhere, nowhere, plain.peak_bytes - kept, fixed_bytes)
