"""The record of a dry step: operators, storages and the level of memory over time, as plain data.

Time is counted in operators: operator i runs at time i. A storage born at i is allocated in operator i and in all later
ones before `died`.
"""

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tightfit.devices.clocks import Clocks


class Phase(enum.StrEnum):
    """The parts of a training step."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(enum.StrEnum):
    """The purpose of a storage."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer states"
    ACTIVATION = "activations"
    INPUT = "inputs"
    WORKSPACE = "workspace"


class ModuleCall(NamedTuple):
    """One forward of a module: its path, the index of the call from which it was called (-1 for none), and its range of
    operators, half open. `is_checkpointed` says that a checkpoint of the model's own will run it again,
    `runs_compiled` that it calls functions under `torch.compile` itself.
    """

    path: str
    caller: int
    start: int
    end: int
    is_checkpointed: bool = False
    runs_compiled: bool = False


# Named tuples: a trace makes tens of thousands of these, and a frozen dataclass sets each field by a call.
class OperatorRecord(NamedTuple):
    """One operator call.

    `module` is the path of the innermost module; in backward, the module of the forward operator whose gradient this
    is. `region`, `occurrence` and `operands` are those of an observed block (see `tightfit.levers.activity`). `reads`
    and `makes` are indices of values, so the operators of a block form a graph.
    """

    name: str
    phase: Phase
    module: str
    seconds: float
    workspace_bytes: int
    region: str | None
    occurrence: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    chooses: bool  # its results are indices: routing, sorting
    copied_bytes: int = 0  # of a lever's copy out of the counted memory, or back
    executor_seconds: float = 0.0  # the part of `seconds` in which only the executor works: it records or replays
    call: int = -1  # the call of `module` that it belongs to, as an index into `StepTrace.calls`
    host_seconds: float = 0.0  # in which the host launches it; on a CPU, in which it runs
    device_seconds: float = 0.0  # in which the device runs it
    operands: str = ""
    alone: Clocks | None = None  # on a card: its seconds on both clocks without the executor

    def seconds_with(self, executor_seconds: float) -> float:
        """Its seconds if the executor took so many of the host for it. On a card the device may work meanwhile."""
        if self.alone is None:
            return self.seconds - self.executor_seconds + executor_seconds
        return max(self.alone.host + executor_seconds, self.alone.device)


class StorageRecord(NamedTuple):
    """One block of memory, from its allocation to its release. `died` is None if it outlives the step.

    `shape` and `dtype` are those of the first tensor seen over it. `name` is the name of a parameter, buffer, gradient
    or optimizer state. `stream` is the stream that allocated it, 0 for the one that computes: CUDA's allocator gives
    memory of one stream to no other. Memory of a card's host has `host_bytes`, and no `bytes`.
    """

    bytes: int
    category: Category
    operator: int | None  # the operator that allocated it; None if it existed before the step
    born: int
    died: int | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    name: str = ""
    stream: int = 0
    host_bytes: int = 0
    is_pinned: bool = False


class ValueRecord(NamedTuple):
    """The content of a storage between two writes. `saved` says that autograd saves it for backward."""

    storage: int
    operator: int | None
    saved: bool


NUMBER_READ, ARE_EQUAL = "a number read from a tensor", "whether two tensors are equal"
READ_BY_OPTIMIZER = "a number that the optimizer read from a tensor"
ANSWERED = frozenset({NUMBER_READ, ARE_EQUAL})


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that the step read and a dry run does not have, and the assumed answer."""

    question: str
    module: str
    where: str
    answer: str
    moves_peak: bool


@dataclass(frozen=True)
class StepTrace:
    """The record of one training step, run dry."""

    operators: tuple[OperatorRecord, ...]
    storages: tuple[StorageRecord, ...]
    values: tuple[ValueRecord, ...]
    levels: tuple[int, ...]  # bytes in use while operator i runs, its workspace included
    starts: tuple[int, ...]  # bytes in use when operator i starts, before it allocates anything
    assumptions: tuple[Assumption, ...]
    loop_repeats: int = 1  # the number of micro-batches that the last traced one represents
    repeated: tuple[int, int] = field(default=(0, 0))  # first and last operator of the last traced micro-batch
    with_gradient: tuple[str, ...] = ()  # names of the parameters that the step gave a gradient
    calls: tuple[ModuleCall, ...] = ()  # every forward of a module, in the order in which they began
    gradients_before: tuple[str, ...] = ()  # names of the parameters that have a gradient when the step begins
    reads_draws: bool = False  # whether code read numbers that were drawn at random
    reserved_bytes: int | None = None  # the peak of CUDA's reserved memory; None on a CPU
    first_step: "StepTrace | None" = None  # where it has other operators, or other buckets, than every later one

    @property
    def has_answers(self) -> bool:
        """True if code read numbers that a dry run does not have, and that were not drawn."""
        return any(assumption.question in ANSWERED for assumption in self.assumptions)

    @property
    def peak_depends_on_data(self) -> bool:
        """True if sizes in this trace depend on assumed numbers."""
        return any(assumption.moves_peak for assumption in self.assumptions)

    @cached_property
    def peak_index(self) -> int:
        """The index of the operator that runs at the peak."""
        return max(range(len(self.levels)), key=self.levels.__getitem__)

    @cached_property
    def last_forward_read(self) -> dict[int, int]:
        """For each value that forward reads, the last operator that does."""
        return {
            value: index
            for index, operator in enumerate(self.operators)
            if operator.phase is Phase.FORWARD
            for value in operator.reads
        }

    @cached_property
    def end_of_forward(self) -> int:
        """The operator after the last forward operator of the last traced micro-batch."""
        # Not the first backward operator: a loss that computes gradients (a gradient penalty) runs backward before it.
        first, last = self.repeated
        return next((i + 1 for i in range(last - 1, first - 1, -1) if self.operators[i].phase is Phase.FORWARD), first)

    @property
    def peak_bytes(self) -> int:
        return self.levels[self.peak_index]

    @property
    def peak_operator(self) -> OperatorRecord:
        return self.operators[self.peak_index]

    @cached_property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self._sum([operator.seconds for operator in self.operators])

    @cached_property
    def host_seconds(self) -> float:
        """Seconds in which the host launches a step's operators; on a CPU, in which it runs them."""
        return self._sum([operator.host_seconds for operator in self.operators])

    @cached_property
    def device_seconds(self) -> float:
        """Seconds in which the device runs a step's kernels, without gaps between them."""
        return self._sum([operator.device_seconds for operator in self.operators])

    def _sum(self, seconds: Sequence[float]) -> float:
        """The sum over a step, with every micro-batch."""
        first, last = self.repeated
        return sum(seconds) + (self.loop_repeats - 1) * sum(seconds[first:last])

    def seconds_by_phase(self) -> dict[Phase, float]:
        totals = dict.fromkeys(Phase, 0.0)
        first, last = self.repeated
        for index, operator in enumerate(self.operators):
            times = self.loop_repeats if first <= index < last else 1
            totals[operator.phase] += times * operator.seconds
        return totals

    def by_category(self, index: int | None = None) -> dict[Category, int]:
        """Bytes by category while an operator runs (by default the one at the peak)."""
        index = self.peak_index if index is None else index
        totals = dict.fromkeys(Category, 0)
        for storage in self.alive_at(index):
            totals[storage.category] += storage.bytes
        totals[Category.WORKSPACE] += self.levels[index] - sum(totals.values())
        return totals

    @cached_property
    def host_by_category(self) -> dict[Category, int]:
        """Bytes of a card's host at the highest point there; empty on a CPU, and if a step leaves nothing there.

        Pinned memory is rounded up to powers of two, and PyTorch keeps what is freed for the next tensor of that size
        (`CachingHostAllocatorImpl` in ATen/core/CachingHostAllocator.h): each size counts with its most tensors.
        """
        sizes: dict[int, list[StorageRecord]] = {}  # 0: pageable memory
        for storage in self.storages:
            if storage.host_bytes:
                size = 1 << (storage.host_bytes - 1).bit_length() if storage.is_pinned else 0
                sizes.setdefault(size, []).append(storage)
        totals: dict[Category, int] = {}
        for size, storages in sizes.items():
            for storage in _most_at_once(storages, size):
                totals[storage.category] = totals.get(storage.category, 0) + (size or storage.host_bytes)
        return totals

    def alive_at(self, index: int) -> list[StorageRecord]:
        return [s for s in self.storages if s.born <= index and (s.died is None or s.died > index)]

    def timeline(self) -> dict[Category, list[int]]:
        """Bytes of each category while each operator runs."""
        count = len(self.operators)
        return {category: _levels(count, self._of(category)) for category in Category} | {
            Category.WORKSPACE: self._workspace_timeline()
        }

    def _of(self, category: Category) -> Iterable[StorageRecord]:
        return (storage for storage in self.storages if storage.category is category)

    def _workspace_timeline(self) -> list[int]:
        others = _levels(len(self.operators), (s for s in self.storages if s.category is not Category.WORKSPACE))
        return [level - other for level, other in zip(self.levels, others, strict=True)]

    def phase_peaks(self) -> dict[Phase, int]:
        """The highest level within each phase."""
        peaks = dict.fromkeys(Phase, 0)
        for operator, level in zip(self.operators, self.levels, strict=True):
            peaks[operator.phase] = max(peaks[operator.phase], level)
        return peaks


def _levels(count: int, storages: Iterable[StorageRecord]) -> list[int]:
    changes = [0] * (count + 1)
    for storage in storages:
        changes[min(storage.born, count)] += storage.bytes
        if storage.died is not None:
            changes[min(storage.died, count)] -= storage.bytes
    return list(itertools.accumulate(changes))[:count]


def _most_at_once(storages: Sequence[StorageRecord], size: int) -> list[StorageRecord]:
    """Those of the host's storages that are there at the highest point. Each counts as `size` bytes, or as its own."""
    changes: dict[int, int] = {}
    for storage in storages:
        changes[storage.born] = changes.get(storage.born, 0) + (size or storage.host_bytes)
        if storage.died is not None:
            changes[storage.died] = changes.get(storage.died, 0) - (size or storage.host_bytes)
    times = sorted(changes)
    levels = list(itertools.accumulate(changes[time] for time in times))
    peak = times[max(range(len(levels)), key=levels.__getitem__)]
    return [s for s in storages if s.born <= peak and (s.died is None or s.died > peak)]


def highest(levels: Sequence[int], first: int, last: int) -> int:
    """The highest level from operator `first` up to, not including, `last`."""
    return max(levels[first:last])
