"""Processes that answer questions. A dry run holds Python's interpreter lock, so threads would wait for each other.

A worker is asked one question at a time. One that is too slow is killed, and another one takes its place.
"""

import importlib
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tightfit.cli.explorer.limits import SECONDS
from tightfit.cli.explorer.messages import Progress, Waited
from tightfit.errors import TightfitError
from tightfit.runtime.idle_lines import leave_out_idle_lines

MEMORY_BYTES = 8 * 2**30  # of data that a worker may allocate; dry runs of the largest models need 1 GiB
LOOK_SECONDS = 0.2  # how often a wait looks whether the page is closing
REMEMBERED = 64  # answers
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
READY, END = "the worker is ready", "the answer is complete"
OVER = "the page is closing, or nobody waits for this answer any more: ask again"


class WorkerError(TightfitError):
    """A question that no worker can answer now: it took too long, its process ended, or nobody waits for it."""


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started here do not see Ctrl-C, which goes to every process of the terminal, while they import."""
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """One process, and the pipe to it."""

    def __init__(self, answer: str):
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of the server
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, answer), daemon=True)
        with interrupts_blocked():
            self.process.start()
        theirs.close()
        self.is_ready = False

    def ask(self, question: Any, is_over: Callable[[], bool], seconds: float) -> Iterator[Any]:
        """The parts of an answer, as they come. Raises `WorkerError`, also where `is_over` says that nobody waits."""
        try:
            while not self.is_ready:  # the imports are not the question's
                for part in self._next(is_over, time.monotonic(), math.inf):
                    self.is_ready = part == READY
            began = time.monotonic()
            self.pipe.send(question)
            while True:
                for part in self._next(is_over, began, seconds):
                    if part == END:
                        return
                    yield part
        except (EOFError, OSError) as error:
            raise WorkerError("the process that computed this answer ended: ask for less, or ask again") from error

    def _next(self, is_over: Callable[[], bool], began: float, seconds: float) -> Iterator[Any]:
        """The next message of the process, and before it a `Waited` for each second that this takes."""
        told = 0
        while not self.pipe.poll(LOOK_SECONDS):
            if is_over():
                raise WorkerError(OVER)
            waited = time.monotonic() - began
            if waited > seconds:
                raise WorkerError(
                    f"no answer within {seconds:.0f} seconds: ask for a smaller model or batch, or use the command line"
                )
            if waited >= 1 and int(waited) > told:
                told = int(waited)
                yield Waited(told)
        yield self.pipe.recv()

    def end(self) -> None:
        """End the process, whatever it does."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


class Readers:
    """Which question each reader asked last. One that is older, or whose page is gone, need not be answered."""

    def __init__(self) -> None:
        self.last: dict[str, object] = {}

    def asks(self, reader: str) -> Callable[[], bool]:
        """Note a question. Returns a function that says whether the reader has left it since."""
        question = self.last[reader] = object()
        return lambda: self.last.get(reader) is not question

    def leaves(self, reader: str) -> None:
        self.last.pop(reader, None)


class Workers:
    """A fixed number of workers, and the answers that they gave last. Used by several threads."""

    def __init__(self, count: int, *, answer: str = "tightfit.cli.explorer.answers:answered", seconds: float = SECONDS):
        self.count = count
        self.answer = answer
        self.seconds = seconds
        self.idle: queue.Queue[Worker] = queue.Queue()  # the free ones; questions wait for one
        self.lock = threading.Lock()
        self.all: set[Worker] = set()
        self.remembered: OrderedDict[Hashable, tuple[Any, ...]] = OrderedDict()
        self.closing = threading.Event()
        for _ in range(count):
            worker = self._started()
            assert worker is not None, "nothing closes what is being made"
            self.idle.put(worker)

    def ask(self, question: Hashable, has_left: Callable[[], bool] = lambda: False) -> Iterator[Any]:
        """The parts of an answer, from memory or from the first worker that is free.

        Where `has_left` says that the reader no longer waits, its worker becomes free. Raises `WorkerError`.
        """
        known = self.remembered.get(question)
        if known is not None:
            yield from known
            return

        def is_over() -> bool:
            return self.closing.is_set() or has_left()

        worker: Worker | None = self._free_worker(is_over)
        parts: list[Any] = []
        is_whole = False
        try:
            for part in worker.ask(question, is_over, self.seconds):
                if not isinstance(part, Progress | Waited):  # of this answer, and not of one from memory
                    parts.append(part)
                yield part
            is_whole = True
        finally:
            # A reader that has left, a slow answer and a dead process end the same way: with a fresh worker.
            if not is_whole:
                worker = self._replaced(worker)
            if worker is not None:
                self.idle.put(worker)
        self._remember(question, tuple(parts))

    def close(self) -> None:
        """End all workers; questions in progress end with an error."""
        self.closing.set()
        with self.lock:
            workers, self.all = self.all, set()
        for worker in workers:
            worker.end()

    def _free_worker(self, is_over: Callable[[], bool]) -> Worker:
        while not is_over():
            try:
                return self.idle.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
        raise WorkerError(OVER)

    def _started(self) -> Worker | None:
        with self.lock:
            if self.closing.is_set():
                return None
            worker = Worker(self.answer)
            self.all.add(worker)
            return worker

    def _replaced(self, worker: Worker) -> Worker | None:
        with self.lock:
            self.all.discard(worker)
        worker.end()
        return self._started()

    def _remember(self, question: Hashable, parts: tuple[Any, ...]) -> None:
        with self.lock:
            self.remembered[question] = parts
            while len(self.remembered) > REMEMBERED:
                self.remembered.popitem(last=False)


def serve(pipe: Connection, answer: str) -> None:
    """A worker's life: read a question, send the parts of its answer, until the page is gone.

    The function that `answer` names gets the question, and a function that sends something before the next part.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process of the terminal; the page ends us
    leave_out_idle_lines()
    os.environ.update(OFFLINE)
    sys.addaudithook(refuse_network)
    _limit_memory()
    answers = _loaded(answer)
    pipe.send(READY)
    while True:
        try:
            question = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            for part in answers(question, pipe.send):
                pipe.send(part)
            pipe.send(END)
        except (BrokenPipeError, ConnectionResetError):
            return


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: nothing that a model's configuration makes a package do leaves this machine."""
    if event in NETWORK:
        raise OSError(f"the page's workers have no network ({event})")


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _loaded(answer: str) -> Callable[[Any, Callable[[Any], None]], Iterator[Any]]:
    """The function that `module:function` names, once the process is set up."""
    module, _, name = answer.partition(":")
    return getattr(importlib.import_module(module), name)
