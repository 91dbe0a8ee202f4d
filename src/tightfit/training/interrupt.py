"""Signals that end a training: the step that runs is finished, and what is done so far is kept."""

import signal
import threading
from types import FrameType
from typing import Any, Self

# Ctrl-C; the polite end that `kill`, schedulers and containers send; a terminal that is gone.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """While it is entered, the first signal that would end the process only sets `received`; a second one acts at once.

    Weights that are half updated are of no use to anybody, so a step is never cut in two. A signal that is ignored
    (`nohup`) stays ignored. Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._restore()

    def deliver(self) -> None:
        """What was received, to whom it would have gone; Ctrl-C as `KeyboardInterrupt`, whoever handles it."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            signal.raise_signal(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
