"""Ctrl-C during a training: the step that runs is finished, and what is done so far is kept."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """While it is entered, the first SIGINT only sets `received`; a second one raises `KeyboardInterrupt` at once.

    Weights that are half updated are of no use to anybody, so a step is never cut in two. Outside the main thread,
    where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
