"""Counts the states of the CPU's random generator that a step requests in a dry run.

`torch.get_rng_state` allocates 5 kB, and no operator shows it. `torch.utils.checkpoint` holds one state from each
forward to its backward, and another one while it runs that forward again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tightfit.runtime.simulation import host_memory
from tightfit.tracing.dry_run import DryRun


class _Counted(threading.local):
    """The dry run of this thread."""

    report: Callable[[torch.Tensor], None] | None = None  # called with each state of the CPU's generator


_counted = _Counted()


class _Counting:
    """A replacement of `torch.get_rng_state` that reports each state to its thread's dry run.

    It is installed while any thread has a dry run.
    """

    def __init__(self):
        self._real: Callable[[], torch.Tensor] = torch.get_rng_state
        self._dry_runs = 0
        self._lock = threading.Lock()

    def __call__(self) -> torch.Tensor:
        state = self._real()
        if _counted.report is not None:
            _counted.report(state)
        return state

    def __enter__(self) -> None:
        with self._lock:
            if not self._dry_runs:
                self._real = torch.get_rng_state
                torch.get_rng_state = self
            self._dry_runs += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._dry_runs -= 1
            if not self._dry_runs:
                torch.get_rng_state = self._real


_counting = _Counting()


@contextmanager
def random_states_counted(dry: DryRun) -> Iterator[None]:
    """A context in which each state that this thread requests is a storage of the dry run until it is freed."""

    def asked(state: torch.Tensor) -> None:
        with host_memory():
            dry.see(state)

    with _counting:
        _counted.report = asked
        try:
            yield
        finally:
            _counted.report = None
