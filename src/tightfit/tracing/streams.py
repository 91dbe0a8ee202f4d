"""Follows which streamed weights are on the device in a dry run: the real window decides, and only the ledger moves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tightfit.devices.clocks import Seconds
from tightfit.levers.activity import simulators
from tightfit.levers.stream.lever import rings_on
from tightfit.levers.stream.ring import Ring
from tightfit.levers.stream.tiers import STAGE_BYTES, STAGES, in_pages
from tightfit.levers.stream.window import Window
from tightfit.runtime.simulation import simulation
from tightfit.tracing.copies import BACK, STREAM, WAIT, Clock, copies_simulated
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.record import Category
from tightfit.tracing.shapes import TensorShape


@contextmanager
def moves_simulated(dry: DryRun, model: nn.Module | None = None) -> Iterator[None]:
    """`copies_simulated`, and the weights of streamed blocks come and go in the record alone.

    At its start those of the model are where they are between two steps. Those of other models are when they are used.
    """
    with copies_simulated(dry) as clock:
        simulators.weights = SimulatedWeights(dry, clock)
        try:
            for ring in () if model is None else rings_on(model):
                simulators.weights.window_of(ring)
                dry.ledger.begin_again()  # what is on the host was never in the record
            yield
        finally:
            simulators.weights = None


class SimulatedWeights:
    """Mutable: the windows of the rings that a dry run has met."""

    def __init__(self, dry: DryRun, clock: Clock | None):
        self._dry, self._clock = dry, clock
        self._windows: dict[int, tuple[Ring, Window]] = {}  # by identity; the ring is held meanwhile

    def window_of(self, ring: Ring) -> Window:
        found = self._windows.get(id(ring))
        if found is None:
            mover = SimulatedMoves(self._dry, self._clock, ring)
            window = Window(len(ring.blocks), ring.room(on_cuda=simulation.of_cuda), ring.ahead, mover)
            mover.begin(window.here)
            found = self._windows[id(ring)] = (ring, window)
        return found[1]


class SimulatedMoves:
    """Moves the blocks of a ring in the record of a dry run. On CUDA copies run in parallel with the computation."""

    def __init__(self, dry: DryRun, clock: Clock | None, ring: Ring):
        self._dry, self._clock = dry, clock
        self._sizes = {number: block.sizes() for number, block in ring.blocks.items()}
        self._is_file = not simulation.of_cuda or ring.folder is not None
        self._ends: dict[int, tuple[int, float]] = {}  # of copies under way: the step, and the time

    def begin(self, here: set[int]) -> None:
        for number, sizes in self._sizes.items():
            self._resize(number, there=number in here)
            for tensor, nbytes in () if self._is_file else sizes:
                name = self._dry.ledger.entries[self._dry.see(tensor).index].name
                self._dry.ledger.reserve_on_host(in_pages(nbytes), Category.PARAMETER, name)
        if self._is_file and simulation.of_cuda:
            self._dry.ledger.reserve_on_host(STAGES * STAGE_BYTES, Category.WORKSPACE)

    def bring(self, number: int) -> None:
        self._dry.begin([])
        self._resize(number, there=True)
        nbytes = sum(size for _, size in self._sizes.get(number, ()))
        seconds = self._dry.cost(STREAM, [TensorShape((nbytes,), (1,), torch.uint8)], [], ())
        if self._clock is not None:
            # One link brings these bytes and those of offload.
            self._ends[number] = self._clock.step, self._clock.copy(BACK, seconds)
            seconds = 0.0
        self._dry.note(STREAM, seconds)

    def arrive(self, number: int) -> None:
        step, end = self._ends.pop(number, (0, 0.0))
        if self._clock is None or step != self._clock.step:
            return
        late = end - self._clock.time()
        if late > 0:
            self._dry.begin([])
            self._dry.note(WAIT, Seconds.of(host=0.0, device=late))

    def save(self, number: int) -> None:
        """Does nothing: the record has no content."""

    def drop(self, number: int) -> None:
        self._ends.pop(number, None)
        self._resize(number, there=False)

    def announce(self, number: int) -> None:
        """Does nothing: the file cache is no memory of the step."""

    def _resize(self, number: int, *, there: bool) -> None:
        for tensor, nbytes in self._sizes.get(number, ()):
            self._dry.see(tensor)
            self._dry.ledger.resize(tensor.untyped_storage(), nbytes if there else 0)
