"""The present work of the levers. They write it, and dry runs and monitors, which see operators, read it.

Each thread has its own state. Autograd runs a backward on CUDA in its own thread, where the state of that backward is
written and read.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Activity(threading.local):
    """Mutable, one instance: `activity`, whose attributes are those of the reading thread."""

    region: str | None = None  # module path of the innermost block that a lever observes
    operands: str = ""  # what the operator works on (`operands_of` in levers/recompute/policy.py)
    occurrence: int = -1  # the number of operators of this name and operands that ran in the block before this one
    recording: bool = False  # a lever records this operator, to recompute or offload its results
    recomputing: int = 0  # depth of running recomputations
    offloading: int = 0  # depth of copies to or from an offload store
    passing: int = 0  # depth of saved-tensor hooks that others set around blocks
    captured: int = 0  # depth of running programs of captured blocks
    on_save: Callable[[Any], None] | None = None  # called with each tensor that autograd saves inside an observed block
    # Called with the path of a block that cannot be captured, and the reason.
    on_refused_capture: Callable[[str, str], None] | None = None

    @contextmanager
    def observed(self, region: str, occurrence: int, operands: str, recording: bool) -> Iterator[None]:
        """A context for one operator of an observed block."""
        outer = self.region, self.occurrence, self.operands, self.recording
        self.region, self.occurrence, self.operands, self.recording = region, occurrence, operands, recording
        try:
            yield
        finally:
            self.region, self.occurrence, self.operands, self.recording = outer


class Simulators(threading.local):
    """The work of a dry run in the place of the levers' own. Mutable, one instance: `simulators`."""

    # Simulates the copy of a tensor's storage out of the counted memory and back (`HostTransfer` in
    # levers/offload/transfers.py). On CUDA the copy may run in parallel with the computation.
    copy: Callable[[Any, bool], Any] | None = None
    # Follows which weights of streamed blocks are on the device: `window_of(ring)` (`tracing/streams.py`).
    weights: Any = None
    # Runs the compiled code of a block with kernels that compute nothing (`tracing/compiled_code.py`).
    compiled: Callable[[Any, float, tuple, dict], Any] | None = None
    # `outside()`, in which blocks are captured, and `run(program, args)` (`tracing/compiled_code.py`). In an observed
    # step, while a captured block runs: the same (`levers/captured/observers.py`).
    captured: Any = None


activity = Activity()
simulators = Simulators()


class _Depth:
    """A context that is entered for single operators, so that a generator would take longer than what runs inside."""

    __slots__ = ("_name",)

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        setattr(activity, self._name, getattr(activity, self._name) + 1)

    def __exit__(self, *raised: object) -> None:
        setattr(activity, self._name, getattr(activity, self._name) - 1)


_RECOMPUTATION, _OFFLOAD, _PASSING = _Depth("recomputing"), _Depth("offloading"), _Depth("passing")


def recomputation() -> _Depth:
    """A context whose operators recompute earlier ones."""
    return _RECOMPUTATION


def offload() -> _Depth:
    """A context whose operators copy values out of the allocator's memory, or back."""
    return _OFFLOAD


def hooks_of_others() -> _Depth:
    """A context whose operators are those of saved-tensor hooks around a block, and none of the block's."""
    return _PASSING


@contextmanager
def captured_program() -> Iterator[None]:
    """A context whose operators are those of a captured block's program."""
    activity.captured += 1
    try:
        yield
    finally:
        activity.captured -= 1
