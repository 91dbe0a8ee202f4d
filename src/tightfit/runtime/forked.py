"""Work that forked copies of this process share, such as dry runs that do not depend on each other.

A fork starts with all that this process has built and traced, at no cost, and sends back only what it was asked for.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")
Notice = Callable[[str], None]
MOST = 8  # processes: each one holds its own traces
_LARGEST_QUEUE = 256


def processes_for(parts: int) -> int:
    """How many processes may share so many parts here: 1 where this process must not be forked."""
    # A fork of a process with threads may inherit a lock that nobody will release. macOS's own libraries start
    # threads. With a device that is not the CPU, autograd has threads, and refuses to run in a fork.
    if sys.platform != "linux" or threading.active_count() > 1 or torch.accelerator.is_available():
        return 1
    return max(1, min(parts, MOST, len(os.sched_getaffinity(0))))


def shared_out(
    work: Callable[[Part, Notice], Result], parts: Sequence[Part], notice: Notice, processes: int
) -> list[Result]:
    """The result of `work` for each part, done by so many processes: this one, and forks of it.

    Each process takes the next part when it has done one. `work` gets a part and a function that shows a line. Results
    and exceptions must be picklable. What a fork could not finish, because the system ended it, is done here. The first
    exception of a fork is raised here.
    """
    assert len(parts) <= _LARGEST_QUEUE, "a part is one byte in a pipe"
    waiting, filled = os.pipe()
    os.write(filled, bytes(range(len(parts))))
    os.close(filled)  # so that reading the empty pipe ends
    forks = []
    try:
        forks += [_Fork(work, parts, waiting) for _ in range(min(processes, len(parts)) - 1)]

        def notice_all(line: str) -> None:
            _receive(forks, notice, patient=False)
            notice(line)

        results = {number: work(parts[number], notice_all) for number in _taken(waiting)}
        while any(not fork.has_ended for fork in forks):
            _receive(forks, notice, patient=True)
    finally:
        os.close(waiting)
        for fork in forks:
            fork.end()  # after an error or Ctrl-C it is still at work
    for fork in forks:
        results |= fork.results
    return [results[number] if number in results else work(part, notice) for number, part in enumerate(parts)]


def in_a_fork(work: Callable[[], Result]) -> Result:
    """What `work` returns, called in a fork of this process, so that nothing of it stays here. The result and
    exceptions must be picklable.

    Raises what `work` raises, and `ChildProcessError` where the system ends the fork.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_alone, args=(work, receiver, sender))
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads, here those of torch.distributed: none of them is needed in the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        kind, value = receiver.recv()
    except EOFError:
        child.join()
        raise ChildProcessError(f"a fork of this process was ended ({child.exitcode})") from None
    finally:
        receiver.close()
        if sys.exc_info()[0] is not None:
            child.kill()
        child.join()
    if kind == "error":
        raise value
    return value


def _run_alone(work: Callable[[], Any], receiver: Connection, sender: Connection) -> None:
    _end_with_parent()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends its fork
    receiver.close()
    torch.set_num_threads(1)  # as in `_run`
    try:
        sender.send(("result", work()))
    except Exception as error:
        sender.send(("error", error))


def _end_with_parent() -> None:
    """The fork holds the connections of its parent: while it lived, nobody would see that the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _taken(waiting: int) -> Iterator[int]:
    """The numbers of parts that this process takes, one when the one before is done."""
    while taken := os.read(waiting, 1):
        yield taken[0]


class _Fork:
    """A process that does parts. Mutable: the results that have come, and whether anything may still come."""

    def __init__(self, work: Callable[..., Any], parts: Sequence[Any], waiting: int):
        context = multiprocessing.get_context("fork")
        self.results: dict[int, Any] = {}
        self.has_ended = False
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(work, parts, waiting, self.receiver, sender), daemon=True)
        self.process.start()
        sender.close()  # so that the end of the fork is seen here

    def receive(self, notice: Notice) -> None:
        try:
            kind, value = self.receiver.recv()
        except EOFError:
            self.has_ended = True
            return
        if kind == "line":
            notice(value)
        elif kind == "result":
            self.results.update(value)
        else:
            raise value

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.receiver.close()


def _receive(forks: Sequence[_Fork], notice: Notice, *, patient: bool) -> None:
    """Take what the forks have sent; if patient, wait for something."""
    at_work = [fork for fork in forks if not fork.has_ended]
    ready = wait([fork.receiver for fork in at_work], None if patient else 0)
    for fork in at_work:
        if fork.receiver in ready:
            fork.receive(notice)


def _run(
    work: Callable[..., Any], parts: Sequence[Any], waiting: int, receiver: Connection, sender: Connection
) -> None:
    """What a fork does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends its forks
    receiver.close()
    torch.set_num_threads(1)  # the threads of the first process are not in a fork, and OpenMP would wait for them
    try:
        for number in _taken(waiting):
            sender.send(("result", {number: work(parts[number], lambda line: sender.send(("line", line)))}))
    except Exception as error:
        sender.send(("error", error))
