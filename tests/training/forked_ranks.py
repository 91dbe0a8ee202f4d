"""Trainings in several real processes, which are forked from one with its imports made: the command as torchrun starts
it, without torchrun's own seconds.

Run as a program, this is that process: it reads jobs, a line of JSON each, and answers with a line. A job is a
training's configuration, the number of ranks, and perhaps a rank that is killed after some seconds.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from forked_trainings import _Trainings


class Ended(NamedTuple):
    """How the ranks ended: the exit code of each, negative for a signal; what they wrote to stderr, notes left out;
    seconds.
    """

    codes: list[int]
    said: str
    seconds: float


class Ranks:
    """The process from which ranks are forked. A context manager."""

    def __enter__(self) -> Self:
        from real_trainings import environment

        self._process = subprocess.Popen(
            [sys.executable, __file__], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
        )  # fmt: skip
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def train(
        self, config: Any, count: int, *words: str, kill: int | None = None, by: int = signal.SIGKILL, after: float = 0
    ) -> Ended:
        """Train on so many ranks: by `tightfit train` with further words, or where the rank `kill` gets a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"config": config.model_dump(mode="json"), "count": count, "words": words, "kill": kill, "by": by}
        self._process.stdin.write(json.dumps({**job, "after": after}) + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))


def _serve() -> None:
    """Until nobody asks any more."""
    import torch.distributed  # noqa: F401

    trainings = _Trainings()
    for line in sys.stdin:
        job = json.loads(line)
        trainings.prepare(job["config"])
        by_command = bool(job["words"]) or job["kill"] is not None
        if by_command:
            from tightfit.cli import app, progress, ways  # noqa: F401
        folder = Path(job["config"]["output"]["folder"]).parent
        path, said = folder / "ranks.yaml", folder / "said.txt"
        path.write_text(json.dumps(job["config"]))  # YAML as well
        said.write_text("")
        gc.collect()
        gc.freeze()
        assert len(os.listdir("/proc/self/task")) == 1, "a fork takes one thread along and the locks of all"
        port, begun = _free_port(), time.perf_counter()
        store = _forked(partial(_keep_store, port))
        words = ["train", str(path), *job["words"]]
        work = partial(_command, words) if by_command else partial(trainings.train, job["config"], resume=False)
        ranks = [_forked(partial(_rank, rank, job["count"], port, work, said)) for rank in range(job["count"])]
        if job["kill"] is not None:
            time.sleep(job["after"])
            os.kill(ranks[job["kill"]], job["by"])  # it may have ended: it is not waited for yet
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        print(json.dumps([codes, _without_notes(said.read_text()), time.perf_counter() - begun]), flush=True)


def _without_notes(text: str) -> str:
    """From the first error on, and nothing where there is none."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith(("error:", "Traceback"))), len(lines))
    return "".join(lines[first:])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _forked(work: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(70)  # `work` ends the process
    return child


def _keep_store(port: int) -> None:
    """What torchrun's agent does: it keeps the store, which outlives every rank."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert store is not None
    while True:
        time.sleep(1)


def _rank(rank: int, count: int, port: int, work: Callable[[], None], said: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in {**place, **agent}.items()}
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code: Any = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _command(words: list[str]) -> None:
    from tightfit.cli import main

    sys.argv = ["tightfit", *words]
    main()


if __name__ == "__main__":
    _serve()
