"""Replays a traced step through a simulated CUDA caching allocator: allocated and reserved bytes."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.tracing.cuda.allocator import Block, CachingAllocator, DeviceFull
from tightfit.tracing.record import Category, Phase, StepTrace, StorageRecord

# The first step allocates the optimizer's states in the middle of freed activations, which fragments segments: 67.3 GiB
# reserved for 54.9 GiB allocated (1B, 4 x 4096, bf16, predicted). Later steps repeat.
STEPS = 3


@dataclass(frozen=True)
class Replay:
    """`levels` are the allocated bytes while each operator of the last step runs. `reserved_bytes` is the peak of the
    reserved bytes over all steps.
    """

    levels: tuple[int, ...]
    reserved_bytes: int


def as_allocated(trace: StepTrace, *, once: bool = False) -> StepTrace:
    """The trace with the levels of CUDA's allocator instead of sums over its storages.

    With `once` the trace is of code that runs once, and not of a step that is repeated.
    """
    played = play(trace, once=once)
    return replace(trace, levels=played.levels, reserved_bytes=played.reserved_bytes)


def fits_device(trace: StepTrace, capacity: int, *, once: bool = False) -> bool:
    """Whether the step runs with `capacity` bytes for segments. The allocator returns free segments if it must."""
    try:
        play(trace, capacity=capacity, once=once)
    except DeviceFull:
        return False
    return True


def play(trace: StepTrace, *, capacity: int | None = None, steps: int = STEPS, once: bool = False) -> Replay:
    """Allocate and free as `steps` steps do, with an allocator configured by the environment.

    With `once` there is one step, which finds the optimizer's states that it did not make itself. Raises `DeviceFull`
    beyond `capacity`.
    """
    player = _Player(trace, CachingAllocator(capacity=capacity, expandable=expandable_segments()))
    levels: list[int] = []
    for step in range(1 if once else steps):
        levels = player.step(first=step == 0 and not once)
    return Replay(tuple(levels), player.allocator.peak_reserved)


def expandable_segments() -> bool:
    """Whether the environment sets `expandable_segments:True` (`PYTORCH_ALLOC_CONF`, or its older name)."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in settings.replace(" ", "").lower()


class _Player:
    """Mutable: the blocks of live storages."""

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
            # A storage that died at its birth is the result of a sum that the real step makes in place.
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
        """Replay one step, and return the allocated bytes while each operator runs."""
        self._release(self.born_and_left())
        self._allocate(self.resident)
        if not first or self.optimizer is None:
            self._allocate(self.states)
        levels = []
        for index, operator in enumerate(self.trace.operators):
            self._release(self.died[index])
            if index == self.optimizer:
                self._allocate(self.states)  # PyTorch's optimizers make their states in their first step
            self._allocate(self.born[index])
            scratch = self.allocator.allocate(operator.workspace_bytes) if operator.workspace_bytes else None
            levels.append(self.allocator.allocated)
            if scratch is not None:
                self.allocator.release(scratch)
        self._release(self.died[len(self.trace.operators)])
        return levels

    def born_and_left(self) -> list[int]:
        """Storages of the previous step that outlived it, such as gradients: the new step allocates them again."""
        return [index for index in self.blocks if self.trace.storages[index].operator is not None]

    def _allocate(self, indexes: list[int]) -> None:
        for index in indexes:
            if index not in self.blocks:
                storage = self.trace.storages[index]
                self.blocks[index] = self.allocator.allocate(storage.bytes, storage.stream)

    def _release(self, indexes: list[int]) -> None:
        for index in indexes:
            if index in self.blocks:
                self.allocator.release(self.blocks.pop(index))
