"""Signals that end a command: with the exit code that a shell gives them, once what is open is closed."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tightfit.cli.together import ranks_started

EXIT_BASE = 128  # of a command that a signal ended, in every shell
INTERRUPTED = EXIT_BASE + signal.SIGINT


def cancel_compilations() -> None:
    """Where a command does not end well, let PyTorch's compiler begin nothing more: at its end Python waits for all
    that was asked of it, and whoever has sent a signal may kill after seconds.
    """
    if "torch._inductor.async_compile" in sys.modules:
        from tightfit.runtime.internals import cancel_waiting_kernels

        cancel_waiting_kernels()


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Inside, SIGTERM, SIGHUP and SIGUSR1 raise `SystemExit(128 + n)`, so that what is open is closed and said.

    A signal that is ignored (`nohup`) or handled already is left alone. In one of several processes they do so until
    the command has ended: torchrun sends SIGTERM to a process that is just about to say that another one is lost.
    """
    before = {}
    terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()]

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the terminal is gone, and what is written to it would fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in terminals:
                os.dup2(nowhere, descriptor)
        raise SystemExit(EXIT_BASE + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items() if ranks_started() == 1 else ():
            signal.signal(number, handler)
