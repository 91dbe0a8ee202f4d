"""Where in a step each block runs: the spans of operators over which its choices move the level of memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.trace.record import OperatorRecord, Phase, StepTrace, highest


@dataclass(frozen=True)
class Window:
    """The operators of one block, half open: forward up to the next block, backward from the one after it."""

    path: str
    forward: tuple[int, int]
    backward: tuple[int, int]


def windows(trace: StepTrace, paths: Sequence[str]) -> tuple[Window, ...]:
    """The windows of the blocks that ran in the last micro-batch, in forward order."""
    first, last = trace.repeated
    spans = _spans(trace, paths)
    order = sorted((p for p in paths if p in spans), key=lambda p: spans[p][0])
    starts = [spans[p][0] for p in order]
    middle = _end_of_forward(trace, first, last)
    forwards = [*zip(starts, [*starts[1:], spans[order[-1]][1] + 1], strict=True)] if order else []
    result: list[Window] = []
    begin = min((spans[p][2] for p in order), default=middle)
    for path, forward in zip(reversed(order), reversed(forwards), strict=True):
        end = max(begin, spans[path][3] + 1)
        result.append(Window(path, forward, (begin, end)))
        begin = end
    return tuple(reversed(result))


def _spans(trace: StepTrace, paths: Sequence[str]) -> dict[str, tuple[int, int, int, int]]:
    """For each block that ran: its first and last operator in forward, and in backward."""
    first, last = trace.repeated
    owner: dict[str, str | None] = {}
    spans: dict[str, list[int]] = {}
    for index in range(first, last):
        operator = trace.operators[index]
        module = operator.module
        if module not in owner:
            owner[module] = next((p for p in paths if module == p or module.startswith(f"{p}.")), None)
        path = owner[module]
        if path is None:
            continue
        span = spans.setdefault(path, [index, index, -1, -1])
        if operator.phase is Phase.FORWARD:
            span[1] = index
        else:
            span[2] = index if span[2] < 0 else span[2]
            span[3] = index
    return {path: (a, b, c, d) for path, (a, b, c, d) in spans.items() if c >= 0}


def _end_of_forward(trace: StepTrace, first: int, last: int) -> int:
    return next((i for i in range(first, last) if trace.operators[i].phase is not Phase.FORWARD), last)


def level_at(trace: StepTrace, index: int) -> int:
    """Bytes in use before operator `index` starts."""
    return trace.starts[index] if index < len(trace.starts) else trace.levels[-1]


@dataclass(frozen=True)
class Footprint:
    """What one block does to the level of memory, as a trace shows it, and what it takes to offload and to record."""

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    lever_seconds: float = 0.0


def footprint(trace: StepTrace, window: Window, *, beside: bool = False) -> Footprint:
    """Bytes that the block keeps from forward to backward, and its highest points above the levels beside it.

    Copies that go on `beside` the computation cost what is left of them when the block's own forward, or backward, has
    ended: its neighbours' time is for their own copies.
    """
    start, end = window.forward
    forward, backward = trace.operators[start:end], trace.operators[slice(*window.backward)]
    return Footprint(
        kept_bytes=level_at(trace, end) - level_at(trace, start),
        forward_bytes=highest(trace.levels, start, end) - level_at(trace, start),
        backward_bytes=highest(trace.levels, *window.backward) - level_at(trace, window.backward[1]),
        lever_seconds=sum(_copy_seconds(span, beside) for span in (forward, backward))
        + sum(
            operator.executor_seconds
            for operator in (*forward, *backward)
            if not operator.copied_bytes and operator.phase is Phase.FORWARD
        ),
    )


def _copy_seconds(operators: Sequence[OperatorRecord], beside: bool) -> float:
    copies = sum(operator.seconds for operator in operators if operator.copied_bytes)
    if not beside:
        return copies
    return max(0.0, copies - sum(operator.seconds for operator in operators if not operator.copied_bytes))
