"""Code that is no part of the training around it: dry runs, calibrations, comparisons. Monitors ignore it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Outside(threading.local):
    """Mutable, one instance: `outside`, whose attributes are those of the reading thread."""

    depth: int = 0
    callbacks: tuple[Callable[[bool], None], ...] = ()  # called with True when such code begins, with False at its end


outside = Outside()


@contextmanager
def outside_training() -> Iterator[None]:
    """A context for code that is no part of the training around it."""
    outside.depth += 1
    try:
        if outside.depth == 1:
            for notify in outside.callbacks:
                notify(True)
        yield
    finally:
        outside.depth -= 1
        if outside.depth == 0:
            for notify in outside.callbacks:
                notify(False)


class OutsideLoop:
    """The state of running code outside of one training loop. A callback in `outside.callbacks` sets `begun`."""

    # Not `outside.depth` alone: autograd runs a backward on CUDA in its own threads, where the attributes of the loop's
    # thread are not visible.

    def __init__(self):
        self.begun = False

    def __bool__(self) -> bool:
        return self.begun or outside.depth > 0
