"""Replays a traced step through a simulated CUDA caching allocator: allocated and reserved bytes."""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.memory.allocator import collector_off
from tightfit.tracing.cuda.allocator import RESULT, CachingAllocator, DeviceFull, Scratch, SegmentPart
from tightfit.tracing.cuda.products import HANDLE_WORKSPACE, takes_workspace
from tightfit.tracing.record import Category, Phase, StepTrace, StorageRecord

# The first step allocates the optimizer's states in the middle of freed activations, which fragments segments: 67.3 GiB
# reserved for 54.9 GiB allocated (1B, 4 x 4096, bf16, predicted). Later steps repeat.
STEPS = 3


# `native_dropout_cuda` in native/cuda/Dropout.cu makes the mask before the result.
_LAST_RESULT_FIRST = frozenset({"aten.native_dropout.default"})


@dataclass(frozen=True)
class AllocatorReplay:
    """`levels` are the allocated bytes while each operator runs, in the step in which they are most. `reserved_bytes`
    is the peak of the reserved bytes over all steps.
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
    """True if the step runs with `capacity` bytes for segments. The allocator returns free segments if it must."""
    try:
        play(trace, capacity=capacity, once=once)
    except DeviceFull:
        return False
    return True


def play(
    trace: StepTrace,
    *,
    capacity: int | None = None,
    steps: int = STEPS,
    once: bool = False,
    emptied: bool = False,
) -> AllocatorReplay:
    """Allocate and free as `steps` steps do, with an allocator configured by the environment.

    With `once` there is one step, which finds the optimizer's states that it did not make itself. With `emptied` each
    begins with an empty cache, as behind `torch.cuda.empty_cache()`. Raises `DeviceFull` beyond `capacity`.
    """
    with collector_off():  # the many small lists would make it visit all traces
        return _played(trace, capacity, 1 if once else steps, once=once, emptied=emptied)


def _played(trace: StepTrace, capacity: int | None, steps: int, *, once: bool, emptied: bool) -> AllocatorReplay:
    allocator = CachingAllocator(capacity=capacity, expandable=expandable_segments())
    player = _Player(trace, allocator)
    levels: list[int] = []
    begun_peak = 0
    state = None
    for step in range(steps):
        if emptied:
            allocator.release_cached()
        if step == 0 and trace.first_step is not None and not once and steps > 1:
            begun = _Player(trace.first_step, allocator)
            begun_peak = max(begun.step(first=True), default=0)
            player.take_over(begun)
        else:
            # The first step finds other free blocks than later ones. One of which up to 1 MiB is not split off counts
            # whole, so that it may be the first step whose peak is highest.
            now = player.step(first=step == 0 and not once)
            levels = list(map(max, levels, now)) if levels else now
        if step + 1 < steps and not emptied:
            before, state = state, player.state()
            if state == before:  # so every later step is as this one
                break
    if levels and begun_peak > max(levels):
        levels[levels.index(max(levels))] = begun_peak
    return AllocatorReplay(tuple(levels), allocator.peak_reserved)


def expandable_segments() -> bool:
    """True if the environment sets `expandable_segments:True` (`PYTORCH_ALLOC_CONF`, or its older name)."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in settings.replace(" ", "").lower()


class _Player:
    """Mutable: the blocks of live storages."""

    def __init__(self, trace: StepTrace, allocator: CachingAllocator):
        self.trace = trace
        self.allocator = allocator
        self.blocks: dict[int, SegmentPart] = {}
        self.resident: list[int] = []
        self.states: list[int] = []
        self.workspaces: list[int] = []  # of cuBLAS: of forward's thread, and of backward's
        self.born: dict[int, list[int]] = defaultdict(list)
        self.died: dict[int, list[int]] = defaultdict(list)
        self.optimizer = next((i for i, o in enumerate(trace.operators) if o.phase is Phase.OPTIMIZER), None)
        for index, storage in self._live():
            self._enter(index, storage)
        self.in_place = self._sums_in_place()

    def _live(self) -> Iterator[tuple[int, StorageRecord]]:
        for index, storage in enumerate(self.trace.storages):
            # A storage that died at its birth is the result of a sum that the real step makes in place.
            if storage.bytes and (storage.died is None or storage.died > storage.born):
                yield index, storage

    def _enter(self, index: int, storage: StorageRecord) -> None:
        if storage.operator is not None:
            self.born[storage.born].append(index)
        elif storage.died is not None and storage.born > 0:
            # A tensor that Python made of numbers, noted when an operator is about to read it. Nobody moves a single
            # float to the device, which an operator reads from the host. Single integers are positions in a cache, but
            # for those that Python writes into a part of a tensor (`x[:, 0] = 1`).
            reader = self.trace.operators[storage.born + 1 :][:1]
            is_written = any(operator.name == "aten.fill_.Tensor" for operator in reader)
            if storage.shape or ("int" in storage.dtype and not is_written):
                self.born[storage.born + 1].append(index)
        elif storage.name == HANDLE_WORKSPACE:
            self.workspaces.append(index)
        elif storage.category is Category.OPTIMIZER_STATE:
            self.states.append(index)
        else:
            self.resident.append(index)
        if storage.died is not None:
            self.died[storage.died].append(index)

    def step(self, *, first: bool) -> list[int]:
        """Replay one step, and return the allocated bytes while each operator runs."""
        left = self.born_and_left()
        self._take_back(left)
        self._release(left)
        self._allocate(self.resident)
        if not first or self.optimizer is None:
            self._allocate(self.states)
        levels, nothing = [], []
        for index, operator in enumerate(self.trace.operators):
            born, died = self.born.get(index, nothing), self.died.get(index)
            if operator.name in _LAST_RESULT_FIRST:
                born = born[::-1]
            for left, result in self.in_place.get(index, nothing):
                if left in self.blocks:
                    self.blocks[result] = self.blocks.pop(left)
            if died is not None:
                self._release(died)
            if index == self.optimizer:
                self._allocate(self.states)  # PyTorch's optimizers make their states in their first step
            if operator.workspace_bytes:
                level = self._run(born, operator.workspace_bytes)
            else:
                self._allocate(born)
                level = self.allocator.allocated
            if first and takes_workspace(operator.name):
                self._allocate(self.workspaces[operator.phase in (Phase.BACKWARD, Phase.RECOMPUTE) :][:1])
            levels.append(level)
        self._release(self.died[len(self.trace.operators)])
        self._allocate(self.workspaces)  # a process that trains has had products in both threads
        return levels

    def state(self) -> object:
        """Where live blocks and free ones are, which is all that a further step depends on."""
        return {index: (b.address, b.size) for index, b in self.blocks.items()}, self.allocator.free_blocks()

    def take_over(self, begun: "_Player") -> None:
        """Go on where another player's step has ended: what outlives a step is the same memory in both traces."""
        lasting: dict[tuple[Category, str, int], list[SegmentPart]] = defaultdict(list)
        for index, block in begun.blocks.items():
            lasting[_kind_of(begun.trace.storages[index])].append(block)
        for index in (*self.resident, *self.states, *self.workspaces):
            if left := lasting[_kind_of(self.trace.storages[index])]:
                self.blocks[index] = left.pop(0)
        for block in itertools.chain.from_iterable(lasting.values()):
            self.allocator.release(block)

    def _run(self, results: list[int], workspace: int) -> int:
        """Allocate results and scratch memory as an operator does, and free the latter. Returns the highest level."""
        blocks = workspace.blocks if isinstance(workspace, Scratch) else (workspace,) if workspace else ()
        first = max(0, len(results) - blocks.count(RESULT))
        self._allocate(results[:first])
        waiting = iter(results[first:])
        held: list[tuple[int, SegmentPart]] = []
        highest = self.allocator.allocated
        for size in blocks:
            if size == RESULT:
                self._allocate([*itertools.islice(waiting, 1)])
            elif size > 0:
                held.append((size, self.allocator.allocate(size)))
            else:
                place = max(i for i, (held_size, _) in enumerate(held) if held_size == -size)
                self.allocator.release(held.pop(place)[1])
            highest = max(highest, self.allocator.allocated)
        for _, block in held:
            self.allocator.release(block)
        return highest

    def _sums_in_place(self) -> dict[int, list[tuple[int, int]]]:
        """By operator: storages that it reads and that end with it, and those of its results, in the same memory.

        An operator's arguments outlive it, but for the sums that autograd makes in place (`Recording.settle_sum`).
        """
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, died in self.died.items():
            if index == len(self.trace.operators):
                continue
            read = {self.trace.values[value].storage for value in self.trace.operators[index].reads}
            lefts = [left for left in died if left in read]
            found[index] = list(zip(lefts, self.born[index], strict=False))
        return found

    def born_and_left(self) -> list[int]:
        """Storages of the previous step that outlived it, such as gradients: the new step allocates them again."""
        return [index for index in self.blocks if self.trace.storages[index].operator is not None]

    def _take_back(self, left: list[int]) -> None:
        """Give what the last step has left to what this one finds: weights that streamed in for it stay where they
        are.
        """
        waiting: dict[tuple[Category, str, int], list[int]] = defaultdict(list)
        for index in left:
            if self.trace.storages[index].name:
                waiting[_kind_of(self.trace.storages[index])].append(index)
        for index in self.resident:
            if index not in self.blocks and (same := waiting.get(_kind_of(self.trace.storages[index]))):
                self.blocks[index] = self.blocks.pop(same.pop(0))

    def _allocate(self, indexes: list[int]) -> None:
        for index in indexes:
            if index not in self.blocks:
                storage = self.trace.storages[index]
                self.blocks[index] = self.allocator.allocate(storage.bytes, storage.stream)

    def _release(self, indexes: list[int]) -> None:
        for index in indexes:
            if index in self.blocks:
                self.allocator.release(self.blocks.pop(index))


def _kind_of(storage: StorageRecord) -> tuple[Category, str, int]:
    """A key that finds a storage in another trace of the same model."""
    return storage.category, storage.name, storage.bytes
