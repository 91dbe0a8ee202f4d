"""The role of this process in a dry run: levers, optimizers and operators of ours ask whether their tensors are real.

Dry runs write, and everything above them reads. Each thread has its own state: a dry run in one thread does not affect
a training in another.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

NULL_CARD = "TIGHTFIT_NULLCARD"  # set where CUDA's runtime computes nothing (`tightfit.devices.nullcard`)


class Simulation(threading.local):
    """Mutable, one instance: `simulation`, whose attributes are those of the reading thread."""

    is_dry: bool = False  # a step runs dry: hooks on the real model's gradients must do nothing
    updates: bool = False  # an optimizer updates a weight within backward
    is_first_step: bool = False  # the step that runs dry is the first one on its device
    sharing_casts: frozenset[int] = frozenset()  # blocks whose calls share casts, as a first step showed
    card: Any = None  # the CUDA device that CPU tensors simulate (`tracing/cuda/role.py`)
    host: int = 0  # depth of code that works in host memory, whatever the device
    in_file: bool = False  # whether new tensors are in a file, which is no memory
    pinned: bool = False  # whether memory that is made there now is pinned
    repeats: int = 1  # how often the operators that run now run in the real step, one after the other
    state_read: Callable[[Tensor], None] | None = None  # counts a state that was read of a CPU's random generator
    card_computes: bool = NULL_CARD not in os.environ  # of all threads: set on the class
    link: Any = None  # copies weights and gradients in the place of `optim.link.Link` (`tracing/copies.py`)

    @property
    def of_cuda(self) -> bool:
        """True if CPU tensors simulate those of a CUDA device."""
        return self.card is not None


simulation = Simulation()


def has_numbers(tensor: Tensor) -> bool:
    """False if what operators make of a tensor tells nothing: in a dry run, on a null card without true values."""
    return not simulation.is_dry and (simulation.card_computes or not tensor.is_cuda)


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """A context whose operators stand for themselves and for the same ones on other pieces of a tensor."""
    outside, simulation.repeats = simulation.repeats, simulation.repeats * times
    try:
        yield
    finally:
        simulation.repeats = outside


@contextmanager
def file_memory() -> Iterator[None]:
    """A context whose new tensors are in a file, in a dry run."""
    outside, simulation.in_file = simulation.in_file, True
    try:
        yield
    finally:
        simulation.in_file = outside


@contextmanager
def host_memory(*, pinned: bool = False) -> Iterator[None]:
    """A context whose new tensors are in host memory, whatever the device; in pinned memory where it is said."""
    outside, simulation.pinned = simulation.pinned, pinned
    simulation.host += 1
    try:
        yield
    finally:
        simulation.host -= 1
        simulation.pinned = outside
