"""Signals that end a training: what runs is cut where it can be undone, and finished where it cannot."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self, TypeVar

from torch import Tensor, nn

# Ctrl-C; the polite end that `kill`, schedulers and containers send; a terminal that is gone; the warning that
# schedulers can be asked for some time before the end (`sbatch --signal=USR1@60`).
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

T = TypeVar("T")


class Interrupted(BaseException):
    """Work that a signal has cut. Only the training that began the work sees it.

    No `Exception`: neither a user's nor a library's `except Exception` may take it for an error of its own.
    """


class Interrupt:
    """While it is entered, the first signal that would end the process only sets `received`; a second one acts at once.

    Work that can be undone (`cuttable`) is cut at the next line of Python: a step may take minutes, and whoever sends a
    signal may kill after seconds. Everything else is finished: weights that are half updated are of no use to anybody.
    A signal that is ignored (`nohup`) stays ignored. Outside the main thread, where Python delivers no signals, it does
    nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._may_cut = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._restore()

    def cuttable(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises `Interrupted` at any place in it where a signal arrives, or has arrived."""
        try:
            # A signal before this line does not cut, and one after `finally` does not either: `Interrupted` leaves this
            # call.
            self._may_cut = True
            self.heed()
            return work()
        finally:
            self._may_cut = False

    def take(self, number: int) -> None:
        """A signal that another process has received: what runs here ends as if it had come here."""
        if self.received is None:
            self.received = number
            self._restore()

    def finish(self) -> None:
        """From here on, what runs inside `cuttable` cannot be undone any more: a later signal waits for its end."""
        self._may_cut = False

    def heed(self) -> None:
        """Raise `Interrupted` where a signal has arrived inside of `cuttable`: one that arrived while Python ignored
        exceptions (in a finaliser) did not cut there.
        """
        if self._may_cut and self.received is not None:
            raise Interrupted

    @contextmanager
    def heeded_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Inside, a backward on the CPU is cut at the next gradient of a parameter.

        Autograd runs a plain backward without a line of Python, and Python delivers signals between two of its lines.
        """

        def ready(parameter: Tensor) -> None:
            self.heed()

        hooks = [p.register_post_accumulate_grad_hook(ready) for p in model.parameters() if p.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def deliver(self) -> None:
        """Deliver the received signal to whoever would have got it; Ctrl-C as `KeyboardInterrupt`, whoever
        handles it.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            signal.raise_signal(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        if self._may_cut:
            raise Interrupted

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
