"""The present activity of the levers, for modes that observe operators.

Levers write it, and traces and the monitor read it, so neither imports the other. Where a dry run simulates a device,
the dry run writes and the levers read. Each thread has its own state: a dry run in one thread does not affect a
training in another. Autograd runs a backward on CUDA in its own thread, where the state of that backward is written and
read.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class Activity(threading.local):
    """Mutable, one instance: `now`, whose attributes are those of the reading thread."""

    # Shared by all threads: the loop's thread sets it, and backward reads it, perhaps in another thread.
    accumulating: ClassVar[int] = 0  # depth of backwards that are not the last one before the optimizer's step

    recomputing: int = 0  # depth of running recomputations
    region: str | None = None  # module path of the innermost block that a lever observes
    operands: str = ""  # what the operator works on (`operands_of` in levers/recompute/policy.py)
    occurrence: int = -1  # the number of operators of this name and operands that ran in the block before this one
    recording: bool = False  # a lever records this operator, to recompute or offload its results
    captured: int = 0  # depth of running programs of captured blocks
    aside: int = 0  # depth of code that is no part of a training: dry runs, calibrations, comparisons
    on_aside: tuple[Callable[[bool], None], ...] = ()  # called with True when such code begins, with False at its end
    dry: bool = False  # a step runs dry: hooks on the real model's gradients must do nothing
    repeats: int = 1  # in a dry run: how often the operators that run now run in the real step, one after the other
    host: int = 0  # depth of code that works in host memory, whatever the device
    playing_cuda: bool = False  # a dry run in which CPU tensors simulate those of a CUDA device
    # While playing CUDA: an operator of PyTorch's runs, inside which no code of the model can read a number.
    inside_operator: bool = False
    adds_in_place: bool = False  # whether that operator adds in place
    card: Any = None  # while playing CUDA: the simulated device (`tracing/cuda/role.py`)
    dry_building: int = 0  # depth of builds of models without memory
    offloading: int = 0  # depth of copies to or from an offload store
    # In a dry run: simulates the copy of a tensor's storage out of the counted memory and back (`HostTransfer` in
    # levers/offload/transfers.py). On CUDA the copy may run in parallel with the computation.
    dry_copy: Callable[[Any, bool], Any] | None = None
    # While playing CUDA: copies weights and gradients between host and device (`PlayedLink` in tracing/copies.py).
    link: Any = None
    # In a dry run: runs the compiled code of a block with kernels that compute nothing (`tracing/compiled_code.py`).
    dry_compiled: Callable[[Any, float, tuple, dict], Any] | None = None
    # In a dry run: `outside()`, in which blocks are captured, and `run(program, args)` (`tracing/compiled_code.py`).
    # In an observed step, while a captured block runs: the same (`levers/captured/observers.py`).
    dry_captured: Any = None
    # In a plan's dry run: called with the path of a block that cannot be captured, and the reason.
    on_refused_capture: Callable[[str, str], None] | None = None
    on_save: Callable[[Any], None] | None = None  # called with each tensor that autograd saves inside an observed block
    on_random_state: Callable[[Any], None] | None = None  # in a dry run: called with each state of the CPU's generator


now = Activity()


@contextmanager
def aside() -> Iterator[None]:
    """A context for code that is no part of the training around it. Monitors ignore it."""
    now.aside += 1
    try:
        if now.aside == 1:
            for notify in now.on_aside:
                notify(True)
        yield
    finally:
        now.aside -= 1
        if now.aside == 0:
            for notify in now.on_aside:
                notify(False)


class AsideOfLoop:
    """Whether the running code is aside of one training loop. A callback in `now.on_aside` sets `begun`."""

    # Not `now.aside` alone: autograd runs a backward on CUDA in its own threads, where the attributes of the loop's
    # thread are not visible.

    def __init__(self):
        self.begun = False

    def __bool__(self) -> bool:
        return self.begun or now.aside > 0


class _Depth:
    """A context that is entered for single operators, so that a generator would take longer than what runs inside."""

    __slots__ = ("_name",)

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        setattr(now, self._name, getattr(now, self._name) + 1)

    def __exit__(self, *raised: object) -> None:
        setattr(now, self._name, getattr(now, self._name) - 1)


_RECOMPUTATION, _OFFLOAD = _Depth("recomputing"), _Depth("offloading")


def recomputation() -> _Depth:
    """A context whose operators recompute earlier ones."""
    return _RECOMPUTATION


def offload() -> _Depth:
    """A context whose operators copy values out of the allocator's memory, or back."""
    return _OFFLOAD


@contextmanager
def captured_program() -> Iterator[None]:
    """A context whose operators are those of a captured block's program."""
    now.captured += 1
    try:
        yield
    finally:
        now.captured -= 1


@contextmanager
def accumulation() -> Iterator[None]:
    """A context for a backward that is not the last one before the optimizer's step."""
    Activity.accumulating += 1
    try:
        yield
    finally:
        Activity.accumulating -= 1


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """A context whose operators stand for themselves and for the same ones on other pieces of a tensor."""
    outside, now.repeats = now.repeats, now.repeats * times
    try:
        yield
    finally:
        now.repeats = outside


@contextmanager
def host_memory() -> Iterator[None]:
    """A context whose new tensors are in host memory, whatever the device."""
    now.host += 1
    try:
        yield
    finally:
        now.host -= 1
