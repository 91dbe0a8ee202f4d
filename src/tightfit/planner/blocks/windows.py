"""Finds where in a step each block runs: the spans of operators over which its choices change the level of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tightfit.tracing.record import OperatorRecord, Phase, StepTrace, highest


@dataclass(frozen=True)
class BlockWindow:
    """The operator ranges of one block, half open.

    `forward` ends where the next block's forward starts. `backward` starts where that block's backward ends.
    """

    path: str
    forward: tuple[int, int]
    backward: tuple[int, int]


def windows(trace: StepTrace, paths: Sequence[str]) -> tuple[BlockWindow, ...]:
    """The windows of the blocks that ran in the last micro-batch, in forward order."""
    spans = _spans(trace, paths)
    order = sorted(spans, key=lambda p: spans[p].forward[0])
    starts = [spans[p].forward[0] for p in order]
    # Operators between two blocks belong to the window of the block before them, so that windows leave no gap in which
    # a level would be missed.
    forwards = [*zip(starts, [*starts[1:], spans[order[-1]].forward[1] + 1], strict=True)] if order else []
    result: list[BlockWindow] = []
    begin = min((spans[p].backward[0] for p in order), default=trace.end_of_forward)
    for path, forward in zip(reversed(order), reversed(forwards), strict=True):
        end = max(begin, spans[path].backward[1] + 1)
        result.append(BlockWindow(path, forward, (begin, end)))
        begin = end
    return tuple(reversed(result))


def is_chain(trace: StepTrace, paths: Sequence[str]) -> bool:
    """True if the blocks run one after the other, and none runs backward before all have run forward.

    A block may run several times in a row. A loss that calls the model twice, or computes gradients itself, makes no
    chain.
    """
    spans = sorted(_spans(trace, paths).values(), key=lambda span: span.forward)
    in_turn = all(one.forward[1] < other.forward[0] for one, other in pairwise(spans))
    return in_turn and all(span.backward[0] >= trace.end_of_forward for span in spans)


class _Span(NamedTuple):
    """First and last operator of a block, in forward and in backward."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def _spans(trace: StepTrace, paths: Sequence[str]) -> dict[str, _Span]:
    """The spans of the blocks that run both in forward and in backward."""
    first, last = trace.repeated
    owners = owning_blocks(trace, paths)
    forward: dict[str, list[int]] = {}
    backward: dict[str, list[int]] = {}
    for index in range(first, last):
        operator = trace.operators[index]
        path = owners[operator.call]
        if path is not None:
            (forward if operator.phase is Phase.FORWARD else backward).setdefault(path, []).append(index)
    # A frozen block, or one whose output is unused, has no backward and no choice to make.
    both = [path for path in forward if path in backward]
    return {p: _Span((forward[p][0], forward[p][-1]), (backward[p][0], backward[p][-1])) for p in both}


def owning_blocks(trace: StepTrace, paths: Sequence[str]) -> dict[int, str | None]:
    """For each module call, by index, the path of the block that contains it, or None. Index -1 means no call."""
    wanted = set(paths)
    owners: dict[int, str | None] = {-1: None}
    for number, call in enumerate(trace.calls):
        # By path too: a checkpoint calls modules again in backward, and those calls have no caller.
        parts = call.path.split(".")
        above = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
        owners[number] = owners[call.caller] or next((path for path in above if path in wanted), None)
    return owners


def calls_of(trace: StepTrace, path: str) -> int:
    """How often a block runs forward in the last micro-batch."""
    first, _ = trace.repeated
    owners = owning_blocks(trace, [path])
    own = [c for c in trace.calls if c.path == path and owners[c.caller] is None]
    return sum(first <= call.start < trace.end_of_forward for call in own)


def level_at(trace: StepTrace, index: int) -> int:
    """Bytes in use before operator `index` starts."""
    return trace.starts[index] if index < len(trace.starts) else trace.levels[-1]


@dataclass(frozen=True)
class Footprint:
    """How one block changes the level of memory, read off a trace, and the seconds that its levers take."""

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    lever_seconds: float = 0.0


def footprint(trace: StepTrace, window: BlockWindow, *, in_parallel: bool = False) -> Footprint:
    """The bytes that the block keeps from forward to backward, and its highest points above the surrounding levels.

    With `in_parallel`, copies run while the block computes. They then cost only the seconds by which they outlast the
    block's own forward or backward, because the neighbours' time is needed for the neighbours' copies.
    """
    start, end = window.forward
    forward, backward = trace.operators[start:end], trace.operators[slice(*window.backward)]
    return Footprint(
        kept_bytes=level_at(trace, end) - level_at(trace, start),
        forward_bytes=highest(trace.levels, start, end) - level_at(trace, start),
        backward_bytes=highest(trace.levels, *window.backward) - level_at(trace, window.backward[1]),
        lever_seconds=sum(_copy_seconds(span, in_parallel) for span in (forward, backward))
        + sum(
            operator.executor_seconds
            for operator in (*forward, *backward)
            if not operator.copied_bytes and operator.phase is Phase.FORWARD
        ),
    )


def _copy_seconds(operators: Sequence[OperatorRecord], in_parallel: bool) -> float:
    copies = sum(operator.seconds for operator in operators if operator.copied_bytes)
    if not in_parallel:
        return copies
    return max(0.0, copies - sum(operator.seconds for operator in operators if not operator.copied_bytes))
