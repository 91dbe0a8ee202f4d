"""Counts the states of the CPU's random generators that a step requests in a dry run.

A state takes 5 kB, and no operator shows it. `torch.utils.checkpoint` holds one from each forward to its backward, and
another one while it runs that forward again (`torch.get_rng_state`). A lever reads one before each draw that a replay
repeats, and one before each repetition, for a moment (`GeneratorState.of`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tightfit.runtime.internals import active_modes
from tightfit.runtime.simulation import host_memory, simulation
from tightfit.tracing.dry_run import DryRun

STATE = "random_state"  # the event of a state that is read


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
        if simulation.state_read is not None:
            simulation.state_read(state)
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
        if dry not in active_modes():
            return  # the dry run's own work, such as a run of one operator for its scratch memory
        if simulation.of_cuda:
            with host_memory():
                dry.see(state)
            return
        # An event of its own: a state that is freed before the next operator would be in no level of the record.
        dry.begin(())
        dry.see(state)
        dry.note(STATE, 0.0)

    with _counting:
        simulation.state_read = asked
        try:
            yield
        finally:
            simulation.state_read = None
