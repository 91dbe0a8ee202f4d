"""Simulates the copies of offload in a dry run: out of the counted memory, and back.

On a CPU a copy blocks the computation. On CUDA copies run in parallel with it, on one stream for each direction. A copy
begins when the previous copy on its stream has ended, and not before it is requested. It adds time only if the
computation waits for it.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from tightfit.devices.clocks import Seconds
from tightfit.levers.activity import offload, simulators
from tightfit.runtime.operators import fresh_memory
from tightfit.runtime.simulation import host_memory, simulation
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.record import OperatorRecord
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.unbacked import is_unbacked

AWAY, BACK, WAIT = "tightfit.offload", "tightfit.fetch", "tightfit.wait"  # as operators of a trace
STREAM = "tightfit.stream"  # copies of streamed weights to the device
IN_FILE = "tightfit.file"  # gradients and states of streamed weights, to the drive and from there
TO_HOST, TO_DEVICE = "tightfit.to_host", "tightfit.to_device"  # copies of weights and gradients


@contextmanager
def copies_simulated(dry: DryRun) -> "Iterator[Clock | None]":
    """A context in which offload copies nothing large, and the trace records the time of each copy.

    Its value is the clock of copies that run in parallel with the computation; None on a CPU.
    """
    clock = Clock(dry) if simulation.of_cuda else None
    simulators.copy = lambda tensor, in_parallel: SimulatedTransfer(dry, tensor, clock if in_parallel else None)
    simulation.link = None if clock is None else SimulatedLink(dry, clock)
    try:
        yield clock
    finally:
        simulators.copy = simulation.link = None


class Clock:
    """Mutable: the time of the computation, and the end of the last copy in each direction, in seconds."""

    def __init__(self, dry: DryRun):
        self._dry = dry
        self._first: OperatorRecord | None = None
        self._counted, self._seconds = 0, 0.0
        self.step = 0  # how often `begin_again` was noticed
        self._ends: dict[str, float] = dict.fromkeys((AWAY, BACK, TO_HOST, TO_DEVICE), 0.0)

    def time(self) -> float:
        """The seconds of all operators recorded so far."""
        operators = self._dry.operators
        first = operators[0] if operators else None
        if first is not self._first:  # `begin_again` cleared the operators: the second step starts at zero
            self._first, self._counted, self._seconds = first, 0, 0.0
            self._ends = dict.fromkeys(self._ends, 0.0)
            self.step += 1
        self._seconds += sum(operator.seconds for operator in operators[self._counted :])
        self._counted = len(operators)
        return self._seconds

    def copy(self, way: str, seconds: float, after: float = 0.0) -> float:
        """The end of a copy that is requested now and may not begin before `after`."""
        self._ends[way] = max(self.time(), self._ends[way], after) + seconds
        return self._ends[way]


class SimulatedLink:
    """The copies of an optimizer between the host and a card, beside what both compute."""

    def __init__(self, dry: DryRun, clock: Clock):
        self._dry, self._clock = dry, clock

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, to_host: bool) -> "SimulatedCopy":
        """Copy a tensor, on a stream of its own."""
        way = TO_HOST if to_host else TO_DEVICE
        copied(self._dry, target, source)
        return SimulatedCopy(self, self._clock.step, self._clock.copy(way, link_seconds(self._dry, source, way)))

    def moved(self, tensor: torch.Tensor, *, to_host: bool) -> torch.Tensor:
        """A copy of a tensor in the other memory. Its seconds stand in the trace as an event of their own."""
        with host_memory() if to_host else nullcontext():
            target = torch.empty_like(tensor)
        copied(self._dry, target, tensor)
        way = TO_HOST if to_host else TO_DEVICE
        self._dry.begin([])
        self._dry.note(way, Seconds.of(host=0.0, device=link_seconds(self._dry, tensor, way)))
        return target

    def in_file(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each of these was written to a file of the host, or read there; its pages were in memory meanwhile."""
        with host_memory():
            torch.empty(sum({id(tensor): tensor.nbytes for tensor in tensors}.values()), dtype=torch.uint8)
        self._dry.begin([])
        moved = TensorShape((sum(tensor.nbytes for tensor in tensors),), (1,), torch.uint8)
        seconds = self._dry.cost(IN_FILE, [moved], [], ())
        self._dry.note(IN_FILE, Seconds.of(host=seconds, device=0.0))

    def wait(self, copy: "SimulatedCopy | None" = None) -> None:
        """Make everything that is computed from here on wait for a copy of this step, or for all to the device."""
        step, end = (self._clock.step, self._clock.copy(TO_DEVICE, 0.0)) if copy is None else (copy.step, copy.end)
        late = end - self._clock.time()
        if step == self._clock.step and late > 0:
            self._dry.begin([])
            self._dry.note(WAIT, Seconds.of(host=late, device=late))


class SimulatedCopy(NamedTuple):
    """A copy that ends at a time of a step. Its name and its method are those of an event of CUDA."""

    link: SimulatedLink
    step: int
    end: float

    def synchronize(self) -> None:
        self.link.wait(self)


def copied(dry: DryRun, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the content of a tensor by an operator that takes no time: another clock has it."""
    before = len(dry.operators)
    target.copy_(source)
    for number, operator in enumerate(dry.operators[before:], start=before):
        dry.operators[number] = operator._replace(seconds=0.0, host_seconds=0.0, device_seconds=0.0)


def link_seconds(dry: DryRun, tensor: torch.Tensor, way: str) -> float:
    """The seconds of a copy between host and device."""
    return dry.cost(way, [TensorShape((tensor.nbytes,), (1,), torch.uint8)], [], ())


class SimulatedTransfer:
    """The simulated copies of one storage. The content is copied for real only if it is known, and thus small."""

    def __init__(self, dry: DryRun, tensor: torch.Tensor, clock: Clock | None):
        storage = tensor.untyped_storage()
        self._dry, self._clock = dry, clock
        self._nbytes, self._dtype, self._device = storage.nbytes(), tensor.dtype, tensor.device
        self._content = ctypes.string_at(storage.data_ptr(), self._nbytes) if dry.see(tensor).known else None
        self._sent = self._move(AWAY)
        self._landed = 0.0

    def left(self) -> None:
        self._wait(self._sent)

    def bring(self) -> torch.Tensor:
        with offload():
            memory = fresh_memory(self._nbytes, self._dtype, self._device)
        cell = self._dry.see(memory)
        cell.known = self._content is not None and not is_unbacked(memory)
        if self._content is not None and cell.known:
            ctypes.memmove(memory.untyped_storage().data_ptr(), self._content, self._nbytes)
        self._landed = self._move(BACK, after=self._sent)
        return memory

    def arrived(self) -> None:
        self._wait(self._landed)

    def _move(self, way: str, after: float = 0.0) -> float:
        """Record a copy, and return its end."""
        seconds = self._dry.cost(way, [TensorShape((self._nbytes,), (1,), torch.uint8)], [], ())
        if self._clock is None:
            self._note(way, seconds)
            return 0.0
        end = self._clock.copy(way, seconds, after)
        self._note(way, 0.0)
        return end

    def _wait(self, end: float) -> None:
        """Record the time that the computation waits for a copy, if it does."""
        if self._clock is not None and end > self._clock.time():
            self._note(WAIT, Seconds.of(host=0.0, device=end - self._clock.time()))

    def _note(self, name: str, seconds: float) -> None:
        """Record an event as an operator of the step that allocates nothing."""
        self._dry.begin([])
        self._dry.note(name, seconds, copied_bytes=self._nbytes)
