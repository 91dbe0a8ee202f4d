"""Code that is no part of the training around it: dry runs, calibrations, comparisons. Monitors ignore it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Asides(threading.local):
    """Mutable, one instance: `asides`, whose attributes are those of the reading thread."""

    depth: int = 0
    callbacks: tuple[Callable[[bool], None], ...] = ()  # called with True when such code begins, with False at its end


asides = Asides()


@contextmanager
def aside() -> Iterator[None]:
    """A context for code that is no part of the training around it."""
    asides.depth += 1
    try:
        if asides.depth == 1:
            for notify in asides.callbacks:
                notify(True)
        yield
    finally:
        asides.depth -= 1
        if asides.depth == 0:
            for notify in asides.callbacks:
                notify(False)


class AsideOfLoop:
    """The state of running code outside of one training loop. A callback in `asides.callbacks` sets `begun`."""

    # Not `asides.depth` alone: autograd runs a backward on CUDA in its own threads, where the attributes of the loop's
    # thread are not visible.

    def __init__(self):
        self.begun = False

    def __bool__(self) -> bool:
        return self.begun or asides.depth > 0
