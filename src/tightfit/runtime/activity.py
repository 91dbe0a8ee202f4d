"""What the levers are doing right now, for whoever watches the operators go by.

The levers write it, the trace and the monitor read it (and the other way round where a dry run plays a device): neither
has to know the other. Each thread has its own: a dry run in one thread does not touch a training in another. Autograd
may run a backward on CUDA in a thread of its own, and what that backward does is written and read there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class Activity(threading.local):
    """Mutable, one instance: `now`, whose attributes are those of the thread that asks."""

    # Of all threads: set where the loop runs, read in backward, which may be in another thread.
    accumulating: ClassVar[int] = 0  # depth of micro-batches under way after which another one follows

    recomputing: int = 0  # depth of recomputations under way
    region: str | None = None  # module path of the innermost block that a lever watches
    occurrence: int = -1  # how many operators of this name that block has run before this one
    recording: bool = False  # a lever notes this operator, to be able to recompute or offload what it makes
    aside: int = 0  # depth of what is no part of a training: dry runs, calibrations, comparisons
    on_aside: tuple[Callable[[bool], None], ...] = ()  # told where that begins (True) and where it has ended (False)
    dry: bool = False  # a step runs dry: what hangs on the real model's gradients keeps still
    host: int = 0  # depth of code that works in host memory, whatever the device
    playing_cuda: bool = False  # a dry run in which CPU tensors stand for those of a CUDA device
    offloading: int = 0  # depth of copies to or from the place where a lever puts values
    # In a dry run: stands for the copy of a tensor's storage out of the counted memory and back (`HostTransfer` in
    # levers/offload/transfers.py). On CUDA the copy may run beside the computation.
    dry_copy: Callable[[Any, bool], Any] | None = None
    # In a dry run: runs the compiled code of a block with kernels that compute nothing (`tracing/compiled_code.py`).
    dry_compiled: Callable[[Any, float, tuple, dict], Any] | None = None
    on_save: Callable[[Any], None] | None = None  # told of each tensor that autograd saves inside a watched block
    on_random_state: Callable[[Any], None] | None = None  # in a dry run: told of each state of the CPU's generator


now = Activity()


@contextmanager
def aside() -> Iterator[None]:
    """What runs inside is no part of the training around it, and no monitor takes it for one."""
    now.aside += 1
    try:
        if now.aside == 1:
            for told in now.on_aside:
                told(True)
        yield
    finally:
        now.aside -= 1
        if now.aside == 0:
            for told in now.on_aside:
                told(False)


class AsideOfLoop:
    """Whether what runs is aside of one loop. True in autograd's own threads too, which run a backward on CUDA: there
    `now.aside` is not what the loop's thread has set. `begun` is set by what that thread tells (`on_aside`).
    """

    def __init__(self):
        self.begun = False

    def __bool__(self) -> bool:
        return self.begun or now.aside > 0


@contextmanager
def recomputation() -> Iterator[None]:
    """The operators inside are a recomputation of earlier ones."""
    now.recomputing += 1
    try:
        yield
    finally:
        now.recomputing -= 1


@contextmanager
def offload() -> Iterator[None]:
    """The operators inside move values out of the allocator's memory, or back."""
    now.offloading += 1
    try:
        yield
    finally:
        now.offloading -= 1


@contextmanager
def accumulation() -> Iterator[None]:
    """The backward inside is not the last one before the optimizer's step."""
    Activity.accumulating += 1
    try:
        yield
    finally:
        Activity.accumulating -= 1


@contextmanager
def host_memory() -> Iterator[None]:
    """What is made inside lies in host memory, whatever the device."""
    now.host += 1
    try:
        yield
    finally:
        now.host -= 1
