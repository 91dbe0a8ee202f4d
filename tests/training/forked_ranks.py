"""Several ranks of one training, forked from the process of `forked_trainings`: what torchrun starts, without the
seconds that its imports take.

Another child keeps the store, as torchrun's agent does: it outlives every rank.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


class RanksEnded(NamedTuple):
    """How the ranks ended: the exit code of each, negative for a signal; what they wrote to stderr, notes left out;
    seconds.
    """

    codes: list[int]
    said: str
    seconds: float


def run_ranks(job: dict[str, Any], train: Callable[[], None]) -> RanksEnded:
    """As a job of `Nursery.train_ranks` says. `train` is the training in a process that has all its imports."""
    folder = Path(job["config"]["output"]["folder"]).parent
    said = folder / "said.txt"
    said.write_text("")
    if job["words"]:
        from tightfit.cli import app, progress  # noqa: F401 - once, before the forks
    port, begun = _free_port(), time.perf_counter()
    store = _forked(partial(_keep_store, port))
    work = partial(command, job["words"]) if job["words"] else train
    ranks = [_forked(partial(_rank, rank, job["count"], port, work, said)) for rank in range(job["count"])]
    if job["kill"] is not None:
        time.sleep(job["after"])
        os.kill(ranks[job["kill"]], job["by"])  # it may have ended: it is not waited for yet
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    seconds = time.perf_counter() - begun
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return RanksEnded(codes, _without_notes(said.read_text()), seconds)


def _without_notes(text: str) -> str:
    """From the first error on, and nothing where there is none."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith(("error:", "Traceback"))), len(lines))
    return "".join(lines[first:])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(70)  # `work` ends the process
    return child


def _keep_store(port: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert store is not None
    while True:
        time.sleep(1)


def _rank(rank: int, count: int, port: int, work: Callable[[], None], said: Path) -> None:
    from tightfit.errors import TightfitError
    from tightfit.ranks.processes.ending import report_once
    from tightfit.ranks.processes.launch import launched

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
    except TightfitError as error:
        line, code, launch = f"error: {error}", error.exit_code, launched()
        assert launch is not None
        report_once(launch, error, lambda: print(line, file=sys.stderr))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def command(words: list[str]) -> None:
    """Run `tightfit` with these words, and end as it does."""
    from tightfit.cli import main

    sys.argv = ["tightfit", *words]
    main()
