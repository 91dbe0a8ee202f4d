"""A traced step put through CUDA's caching allocator: what it really hands out, and what it holds of the device."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.tracing.cuda.allocator import Block, CachingAllocator, DeviceFull
from tightfit.tracing.record import Category, Phase, StepTrace, StorageRecord

STEPS = 3  # the first makes the optimizer's states in the middle of everything; the later ones are alike


@dataclass(frozen=True)
class Replay:
    """`levels` are the bytes handed out while each operator runs, `reserved_bytes` the most that was ever held."""

    levels: tuple[int, ...]
    reserved_bytes: int


def as_allocated(trace: StepTrace) -> StepTrace:
    """The trace with the levels of CUDA's allocator in the place of the sums of its storages."""
    played = play(trace)
    return replace(trace, levels=played.levels, reserved_bytes=played.reserved_bytes)


def fits_device(trace: StepTrace, capacity: int) -> bool:
    """Whether the step runs with so many bytes for segments; free segments are given back where they are in the way."""
    try:
        play(trace, capacity=capacity)
    except DeviceFull:
        return False
    return True


def play(trace: StepTrace, *, capacity: int | None = None, steps: int = STEPS) -> Replay:
    """Allocate and release as the step does, from the first of `steps` on, by an allocator that is set up as the
    environment says. Raises `DeviceFull` beyond `capacity`.
    """
    player = _Player(trace, CachingAllocator(capacity=capacity, expandable=expandable_segments()))
    levels: list[int] = []
    for step in range(steps):
        levels = player.step(first=step == 0)
    return Replay(tuple(levels), player.allocator.peak_reserved)


def expandable_segments() -> bool:
    """Whether the environment sets `expandable_segments:True` (`PYTORCH_ALLOC_CONF`, or by its older name)."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in settings.replace(" ", "").lower()


class _Player:
    """Mutable: the blocks of the storages that are alive."""

    def __init__(self, trace: StepTrace, allocator: CachingAllocator):
        self.trace = trace
        self.allocator = allocator
        self.blocks: dict[int, Block] = {}
        self.resident: list[int] = []
        self.states: list[int] = []
        self.born: dict[int, list[int]] = defaultdict(list)
        self.died: dict[int, list[int]] = defaultdict(list)
        self.optimizer = next((i for i, o in enumerate(trace.operators) if o.phase is Phase.OPTIMIZER), None)
        for index, storage in self._live():
            self._enter(index, storage)

    def _live(self) -> Iterator[tuple[int, StorageRecord]]:
        for index, storage in enumerate(self.trace.storages):
            if storage.bytes and (storage.died is None or storage.died > storage.born):
                yield index, storage

    def _enter(self, index: int, storage: StorageRecord) -> None:
        if storage.operator is not None:
            self.born[storage.born].append(index)
        elif storage.category is Category.OPTIMIZER_STATE:
            self.states.append(index)
        else:
            self.resident.append(index)
        if storage.died is not None:
            self.died[storage.died].append(index)

    def step(self, *, first: bool) -> list[int]:
        """One step; returns the bytes handed out while each operator runs."""
        self._release(self.born_and_left())
        self._allocate(self.resident)
        if not first or self.optimizer is None:
            self._allocate(self.states)
        levels = []
        for index, operator in enumerate(self.trace.operators):
            if index == self.optimizer:
                self._allocate(self.states)
            self._release(self.died[index])
            self._allocate(self.born[index])
            scratch = self.allocator.allocate(operator.workspace_bytes) if operator.workspace_bytes else None
            levels.append(self.allocator.allocated)
            if scratch is not None:
                self.allocator.release(scratch)
        self._release(self.died[len(self.trace.operators)])
        return levels

    def born_and_left(self) -> list[int]:
        """Storages of the step before that outlived it: the new step makes its own."""
        return [index for index in self.blocks if self.trace.storages[index].operator is not None]

    def _allocate(self, indexes: list[int]) -> None:
        for index in indexes:
            if index not in self.blocks:
                self.blocks[index] = self.allocator.allocate(self.trace.storages[index].bytes)

    def _release(self, indexes: list[int]) -> None:
        for index in indexes:
            if index in self.blocks:
                self.allocator.release(self.blocks.pop(index))
