"""Work in forked copies of this process, such as dry runs that do not depend on each other.

A fork starts with all that this process has built and traced, at no cost, and sends back only what it was asked for.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")
Notice = Callable[[str], None]
MOST = 8  # processes: each one holds its own traces
_MOST_PARTS = 30_000  # at once: their numbers are two bytes each, and a pipe holds 64 KiB
_NO_PART = 2**16 - 1  # in the pipe of parts: the end of the work
_threads_of_first: int | None = None  # in a fork


def threads_of_steps() -> int:
    """The threads that operators of a real step have: those of the first process, which its forks cannot use."""
    return _threads_of_first or torch.get_num_threads()


def use_one_thread() -> None:
    """Run operators in one thread from now on. The threads of the first process are not in a fork."""
    global _threads_of_first
    _threads_of_first = threads_of_steps()
    torch.set_num_threads(1)  # else OpenMP would wait for the others


def processes_for(parts: int) -> int:
    """How many processes may share so many parts here: 1 where this process must not be forked."""
    # A fork of a process with threads may inherit a lock that nobody will release. macOS's own libraries start
    # threads. With a device that is not the CPU, autograd has threads, and refuses to run in a fork.
    if sys.platform != "linux" or threading.active_count() > 1 or torch.accelerator.is_available():
        return 1
    if multiprocessing.current_process().daemon:
        return 1  # such as a worker of a pool: multiprocessing lets it have no children
    return max(1, min(parts, MOST, len(os.sched_getaffinity(0))))


def shared_out(
    work: Callable[[Part, Notice], Result], parts: Sequence[Part], notice: Notice, processes: int
) -> list[Result]:
    """The result of `work` for each part, done by so many processes: this one, and forks of it.

    What `Crew.share` says holds here too.
    """
    with Crew(work, min(processes, len(parts)), notice) as crew:
        return [result for _, result in crew.share(parts)]


class Crew:
    """This process and forks of it. Each keeps what it has made, such as traces, from one part of the work to the next.

    `work` gets a part and a function that shows a line. Parts, results and exceptions must be picklable. The first
    exception of a fork is raised here. Use it in a `with` statement, whose end ends the forks. Mutable: its forks.
    """

    def __init__(self, work: Callable[[Any, Notice], Any], processes: int, notice: Notice):
        self.work, self.notice = work, notice
        self.waiting, self.filled = os.pipe()
        self.forks: list[_Fork] = []
        try:
            for _ in range(processes - 1):
                self.forks.append(_Fork(work, self.waiting))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for fork in self.forks:
            fork.end()  # after an error or Ctrl-C it is still at work
        os.close(self.waiting)
        os.close(self.filled)

    def share(self, parts: Sequence[Any]) -> list[tuple[int, Any]]:
        """Which process did each part (0: this one), and its result. Each takes the next part when it has done one.

        What a fork could not finish, because the system ended it, is done here.
        """
        assert len(parts) <= _MOST_PARTS, "the pipe would be full"
        at_work = [fork for fork in self.forks if fork.send("share", parts)]
        numbers = [*range(len(parts)), *[_NO_PART] * (1 + len(at_work))]
        os.write(self.filled, b"".join(number.to_bytes(2) for number in numbers))
        done = {number: (0, self.work(parts[number], self._shown)) for number in _taken(self.waiting)}
        for fork, results in self._answers(at_work):
            done |= {number: (1 + self.forks.index(fork), result) for number, result in results.items()}
        self._empty()
        lost = [number for number in range(len(parts)) if number not in done]
        done |= {number: (0, self.work(parts[number], self.notice)) for number in lost}
        return [done[number] for number in range(len(parts))]

    def ask(self, parts: Mapping[int, Any]) -> dict[int, Any]:
        """The result of a part that each of these processes does, by the number of the process.

        The part of a fork that the system ended is done here, without what the fork had kept.
        """
        asked = [f for number, f in enumerate(self.forks, 1) if number in parts and f.send("ask", parts[number])]
        done = {0: self.work(parts[0], self._shown)} if 0 in parts else {}
        for fork, results in self._answers(asked):
            done |= {1 + self.forks.index(fork): result for result in results.values()}
        return {
            number: done[number] if number in done else self.work(part, self.notice) for number, part in parts.items()
        }

    def _shown(self, line: str) -> None:
        """Show a line of this process, after those that forks have sent."""
        self._receive(patient=False)
        self.notice(line)

    def _answers(self, forks: Sequence["_Fork"]) -> list[tuple["_Fork", dict[int, Any]]]:
        """The results of forks that were sent something, once all of it is done."""
        while any(fork.is_at_work for fork in forks):
            self._receive(patient=True)
        return [(fork, fork.taken()) for fork in forks]

    def _receive(self, *, patient: bool) -> None:
        """Take what the forks have sent; if patient, wait for something."""
        at_work = [fork for fork in self.forks if fork.is_at_work]
        ready = wait([fork.connection for fork in at_work], None if patient else 0)
        for fork in at_work:
            if fork.connection in ready:
                fork.receive(self.notice)

    def _empty(self) -> None:
        """Take what forks that were ended have left in the pipe."""
        os.set_blocking(self.waiting, False)
        with suppress(BlockingIOError):
            while True:
                os.read(self.waiting, select.PIPE_BUF)
        os.set_blocking(self.waiting, True)


def in_a_fork(work: Callable[[], Result]) -> Result:
    """The result of `work`, called in a fork of this process, so that nothing of it stays here. The result and
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
    use_one_thread()
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
    while (taken := int.from_bytes(os.read(waiting, 2))) != _NO_PART:
        yield taken


class _Fork:
    """A process that does parts. Mutable: the results that have come, and whether anything may still come."""

    def __init__(self, work: Callable[..., Any], waiting: int):
        context = multiprocessing.get_context("fork")
        self.results: dict[int, Any] = {}
        self.is_at_work, self.has_ended = False, False
        self.connection, other = context.Pipe()
        # No daemon: its work may have forks of its own.
        self.process = context.Process(target=_run, args=(work, waiting, other, self.connection))
        self.process.start()
        other.close()  # so that the end of the fork is seen here

    def send(self, kind: str, parts: Any) -> bool:
        """Give it something to do. False if the system has ended it."""
        if not self.has_ended:
            try:
                self.connection.send((kind, parts))
                self.is_at_work = True
            except OSError:
                self.has_ended = True
        return not self.has_ended

    def receive(self, notice: Notice) -> None:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.has_ended, self.is_at_work = True, False
            return
        if kind == "line":
            notice(value)
        elif kind == "result":
            self.results.update(value)
        elif kind == "done":
            self.is_at_work = False
        else:
            raise value

    def taken(self) -> dict[int, Any]:
        results, self.results = self.results, {}
        return results

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _run(work: Callable[..., Any], waiting: int, connection: Connection, other: Connection) -> None:
    """The work of a fork."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends its forks
    other.close()
    use_one_thread()

    def notice(line: str) -> None:
        connection.send(("line", line))

    try:
        while True:
            kind, parts = connection.recv()
            if kind == "share":
                for number in _taken(waiting):
                    connection.send(("result", {number: work(parts[number], notice)}))
            else:
                connection.send(("result", {0: work(parts, notice)}))
            connection.send(("done", None))
    except EOFError:
        return  # the first process is gone
    except Exception as error:
        connection.send(("error", error))
