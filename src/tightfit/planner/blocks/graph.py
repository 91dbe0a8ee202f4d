"""Turns the operators that a block ran into a graph."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tightfit.levers.recompute import OperatorKey
from tightfit.planner.blocks.frontier import BlockOperator, KeepSet, keep_set
from tightfit.runtime.module_paths import module_at
from tightfit.tracing.record import OperatorRecord, Phase, StepTrace
from tightfit.tracing.recording import NO_EXECUTOR_COST, ExecutorCost

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class BlockGraph:
    """The forward of one block: for each recorded operator its operation for the frontier, its key, the path of its
    module inside the block, and the bytes of its results. Blocks of one `kind` share prices.
    """

    path: str
    operations: tuple[BlockOperator, ...]
    keys: tuple[OperatorKey, ...]
    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    kind: str
    captured: tuple[float, ...]  # for each operation, the seconds in which a captured block computes it again
    alike: tuple[int, ...] = ()  # for each operation, the first one that does the same for another expert

    def alike_for_experts(self, sets: Sequence[KeepSet], operations: Sequence[BlockOperator]) -> list[KeepSet]:
        """These sets, each with what does the same for other experts: a router sends any number of tokens to one of
        them, and the same number to all.
        """
        if not self.alike:
            return list(sets)
        firsts = [{self.alike[place] for place in each.kept} for each in sets]
        places = [frozenset(p for p, first in enumerate(self.alike) if first in each) for each in firsts]
        return [keep_set(operations, each) for each in places]

    def kept_keys(self, kept: frozenset[int]) -> frozenset[OperatorKey]:
        return frozenset(self.keys[index] for index in kept)


def block_graph(
    trace: StepTrace, model: nn.Module, path: str, executor: ExecutorCost = NO_EXECUTOR_COST
) -> BlockGraph | None:
    """The graph of an observed block, from its first call in the last micro-batch. None if the block did not run.

    `executor` says what it takes itself for each operator that it replays.
    """
    calls = first_call(trace, path)
    if not calls:
        return None
    position = {index: place for place, index in enumerate(calls)}
    operations = tuple(_operation(trace, index, position, calls[-1], executor.replayed) for index in calls)
    keys = tuple(key_of(trace.operators[i]) for i in calls)
    modules = tuple(trace.operators[i].module.removeprefix(path).lstrip(".") for i in calls)
    sizes = tuple(sum(result_sizes(trace, trace.operators[i]).values()) for i in calls)
    captured = tuple(trace.operators[i].seconds_with(executor.captured) for i in calls)
    kind = kind_of(module_at(model, path), keys)
    return BlockGraph(path, operations, keys, modules, sizes, kind, captured, _alike(trace, calls, keys, modules))


def _alike(
    trace: StepTrace, calls: Sequence[int], keys: Sequence[OperatorKey], modules: Sequence[str]
) -> tuple[int, ...]:
    """For each operation the first one of the same name, operands and place among experts; empty where nothing routes.

    Experts are what runs in or below a module that chooses.
    """
    if not trace.peak_depends_on_data:
        return ()
    choosing = {module for module, index in zip(modules, calls, strict=True) if trace.operators[index].chooses}
    firsts: dict[tuple[str, ...], int] = {}
    found = []
    for place, (key, module) in enumerate(zip(keys, modules, strict=True)):
        is_below = any(module == each or module.startswith(f"{each}.") or not each for each in choosing)
        # What is written in place is one storage, whichever expert wrote last.
        is_of_experts = is_below and not key.name.partition(".")[2].partition(".")[0].endswith("_")
        what = key.name, key.operands, _NUMBER.sub("*", module)
        found.append(firsts.setdefault(what, place) if is_of_experts else place)
    return tuple(found)


def first_call(trace: StepTrace, path: str) -> list[int]:
    """Indexes of the operators of the block's first call in the last traced micro-batch."""
    first, last = trace.repeated
    seen: set[OperatorKey] = set()
    calls: list[int] = []
    begun: int | None = None
    for index in range(first, last):
        operator = trace.operators[index]
        if operator.region != path or operator.phase is not Phase.FORWARD:
            continue
        key, call = key_of(operator), _call_around(trace, operator.call, path)
        # The block's second call, where counts of occurrences start again. It may begin with an operator that the first
        # one did not run: a cache is joined only once there is one.
        if key in seen or (begun is not None and call is not None and call != begun):
            break
        begun = call if begun is None else begun
        seen.add(key)
        calls.append(index)
    return calls


def _call_around(trace: StepTrace, number: int, path: str) -> int | None:
    """The outermost call of the module at `path` that contains a call, by index."""
    found = None
    while number != -1:
        if trace.calls[number].path == path:
            found = number
        number = trace.calls[number].caller
    return found


def key_of(operator: OperatorRecord) -> OperatorKey:
    """The key of an operator of an observed block."""
    return OperatorKey(operator.name, operator.occurrence, operator.operands)


def result_sizes(trace: StepTrace, operator: OperatorRecord) -> dict[int, int]:
    """The bytes of an operator's results, by storage: it may return several views of one."""
    storages = (trace.values[value].storage for value in operator.makes)
    return {storage: trace.storages[storage].bytes for storage in storages}


def _operation(
    trace: StepTrace, index: int, position: dict[int, int], last: int, replaying_seconds: float
) -> BlockOperator:
    operator = trace.operators[index]
    producers = {trace.values[value].operator for value in operator.reads}
    inputs = tuple(sorted(position[p] for p in producers if p in position and p < index))
    # A result of the block: the next block holds it anyway, so keeping it costs nothing.
    leaves = any(trace.last_forward_read.get(value, -1) > last for value in operator.makes)
    return BlockOperator(
        seconds=operator.seconds_with(replaying_seconds),
        bytes=0 if leaves else sum(result_sizes(trace, operator).values()),
        saved=any(trace.values[value].saved for value in operator.makes),
        inputs=inputs,
        pinned=leaves or operator.chooses,
    )


def kind_of(block: nn.Module, keys: Sequence[OperatorKey]) -> str:
    """The kind of a block. Blocks of one kind have the same class, shapes of parameters, and operators."""
    shapes = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in block.parameters()]
    return f"{type(block).__name__} {zlib.crc32(repr((shapes, keys)).encode()):08x}"
