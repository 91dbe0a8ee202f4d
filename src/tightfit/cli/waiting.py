"""The progress of a long answer, on stderr: one line that changes on a terminal, and a line now and then elsewhere.

A timer's signal writes it, so it goes on in the middle of a long dry run. A thread would do so too, but a process with
threads cannot be forked, and `fit` shares its recipes among forks.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import typer

TICK = 1.0  # seconds between two looks of a terminal's line
QUIET = 20.0  # seconds without a line that a reader of a log has to bear
CLEAR = "\r\033[K"
# The collector of cycles begins at 700 new objects. An import makes hundreds of thousands, and next to no garbage.
SELDOM = (100_000, 20, 100)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """A context in which the collector runs seldom, as imports and dry runs make much and drop little."""
    often = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*often)


def say(line: str) -> None:
    """A line on stderr that stays, in the place of what a terminal shows meanwhile."""
    typer.echo(f"{CLEAR if sys.stderr.isatty() else ''}{line}", err=True)


def unsaid(line: str) -> None:
    """In the place of `say`, for lines that the command has said before."""


class Waiting:
    """A context in which calls say what is being done. It is shown with the time since the beginning.

    Mutable: the newest line. Where a signal cannot be had (another thread than the first), calls alone write lines.
    """

    def __init__(self, stream: Any = None, quiet: float = QUIET):
        self.stream = sys.stderr if stream is None else stream
        self.is_terminal = self.stream.isatty()
        self.every = TICK if self.is_terminal else quiet
        self.line = ""
        self.began = self.written = time.monotonic()
        self.before: Any = None

    def __enter__(self) -> Self:
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGALRM, lambda *_: self.show())
            signal.setitimer(signal.ITIMER_REAL, self.every, self.every)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.before)
        if self.is_terminal:
            self._write(CLEAR)

    def __call__(self, line: str) -> None:
        """Say what is being done, or was done last."""
        self.line = line
        if self.is_terminal or time.monotonic() - self.written >= self.every:
            self.show()

    def show(self) -> None:
        """Write the newest line."""
        self.written = time.monotonic()
        text = f"{self.written - self.began:.0f} s: {self.line or 'at work'}"
        if self.is_terminal:  # a line that is folded could not be taken back
            self._write(CLEAR + text[: os.get_terminal_size(self.stream.fileno()).columns - 1])
        else:
            self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        # A signal may come while something else is written through the stream's buffer, which cannot be entered twice.
        try:
            os.write(self.stream.fileno(), text.encode(errors="replace"))
        except OSError:  # no such file, as in tests, or nobody reads any more
            self.stream.write(text)
