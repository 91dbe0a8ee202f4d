"""Trainings that are really killed, by the hundred: each in a child forked from a process with its imports made.

Run as a program, this is that process: it reads jobs, a line of JSON each, and answers with a line. A job is a
training's configuration, whether it is resumed, and when it is killed: after some seconds, or just before the n-th
system call that puts its files on disk. SIGKILL kills it, so nothing of it is tidied up.
"""

import gc
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import pytest
from forked_ranks import RanksEnded, command, run_ranks

TIMES = ("tokens_per_second", "seconds", "memory_bytes", "measured_step_seconds", "measured_peak_bytes",
         "host_peak_bytes", "host_by_category", "measured_host_peak_bytes", "measured_phase_bytes")  # fmt: skip
_SYSTEM_CALLS = (
    "create", "append", "write", "truncate", "sync", "close", "rename", "unlink", "mkdir", "rmdir", "sync_folder",
)  # fmt: skip


class Ended(NamedTuple):
    """How a training ended: its exit code, negative for a signal; and, of one that was not killed, its system calls,
    and the seconds that it took.
    """

    code: int
    calls: int
    seconds: float


class Nursery:
    """The process from which trainings are forked. A context manager."""

    def __enter__(self) -> Self:
        from real_trainings import environment

        _know_one_thread()
        quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment(**quiet),
        )  # fmt: skip
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in psutil.Process(self._process.pid).children():
            child.kill()  # a test that failed left it, and nobody ends it any more
        self._process.communicate()

    def train(
        self, config: Any, *, resume: bool = False, after: float | None = None, at_call: int | None = None
    ) -> Ended:
        """Run a training to its end, or to its kill."""
        raw = config.model_dump(mode="json")
        self._ask({"config": raw, "resume": resume, "after": after, "at_call": at_call})
        return Ended(*self._answer())

    def begin(self, config: Any) -> None:
        """Start `tightfit train`, which writes its lines to `said.txt` beside its folder. `ended` waits for it."""
        raw = config.model_dump(mode="json")
        words = ["train", _written(raw, "begun.yaml")]
        self._ask({"config": raw, "resume": False, "after": None, "at_call": None, "words": words})

    def is_there(self) -> bool:
        """True while trainings can run; a failure of this process would else be waited for in vain."""
        return self._process.poll() is None

    def ended(self) -> Ended:
        """Wait for the training that was started last."""
        return Ended(*self._answer())

    def _ask(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> list[Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def train_ranks(
        self,
        config: Any,
        count: int,
        *options: str,
        resume: bool = False,
        kill: int | None = None,
        by: int = signal.SIGKILL,
        after: float = 0,
    ) -> RanksEnded:
        """The same on several ranks; `kill` is the one that gets a signal. With further options, or to be resumed after
        a signal that asks for an end, `tightfit train` runs.
        """
        raw = config.model_dump(mode="json")
        words = ["train", _written(raw, "ranks.yaml"), *options] if options or by != signal.SIGKILL else []
        job = {"config": raw, "resume": resume, "count": count, "words": words, "kill": kill, "by": by, "after": after}
        self._ask(job)
        return RanksEnded(*self._answer())


def _know_one_thread() -> None:
    """The made-up figures of the CPU for one thread too: a process that measured them would have more than one."""
    import torch

    from tightfit.devices import present

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    present.measure("cpu")
    torch.set_num_threads(threads)


def _written(raw: dict[str, Any], name: str) -> str:
    path = Path(raw["output"]["folder"]).parent / name
    path.write_text(json.dumps(raw))  # YAML as well
    return str(path)


def final_state(run: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how often it was killed: the weights' file, metrics and
    result but for times and measured bytes, and the last checkpoint: weights, optimizer states, random states, sampler.
    """
    from tightfit.training.checkpoint.store import Checkpoints

    result = json.loads((run / "result.json").read_text())
    last = Checkpoints(run / "checkpoints").newest_intact().checkpoint
    assert last is not None
    moving = ("counts", "metrics_bytes", "around")
    record = {key: value for key, value in last.record.items() if key not in moving}
    counts = {key: last.record["counts"][key] for key in ("steps", "first_loss", "last_loss", "tokens", "position")}
    return {
        "weights": hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest(),
        "metrics": [_timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "result": {key: value for key, value in _timeless(result).items() if key != "resumed_from"},
        "tensors": dict(last.digests),
        "record": record,
        "counts": counts,
        "files": sorted(path.name for path in run.iterdir()),
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


def _timeless(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if key not in TIMES}


class _Trainings:
    """`train` with all its imports made, and without what takes longer than all the rest of a tiny training: pictures,
    a sample, profiles of the measured steps. Data and prediction, which are the same for the same configuration, are
    made once, before the fork.
    """

    def __init__(self) -> None:
        import torch._dynamo  # noqa: F401 - PyTorch's optimizers import it when the first of them is made
        from made_up_fits import leave_out_predictions, made_up_fit

        from quick_trainings import leave_out_pictures
        from tightfit.training import preparing, purpose

        leave_out_pictures(pytest.MonkeyPatch())
        leave_out_predictions(pytest.MonkeyPatch())
        self._own_fit, self._fit_shards = preparing.fit, preparing.fit_shards
        self._preparing, self._purpose, self._data, self._fit = preparing, purpose, purpose.prepare_data, made_up_fit
        self._known: dict[str, tuple[Any, Any]] = {}

    def prepare(self, raw: dict[str, Any], *, of_ranks: bool) -> None:
        """In the process that forks."""
        from tightfit.devices.present import lookup_present
        from tightfit.training.config import parse_config
        from tightfit.training.objective import CausalLMLoss, counted

        config, preparing = parse_config(raw), self._preparing
        key = json.dumps({name: raw[name] for name in ("data", "model", "training", "memory", "checkpoint")})
        key += str(of_ranks)
        if key not in self._known:
            data = self._data(config.data, config.model, objective=config.training.objective)
            longest, *shorter = [counted(batch) for batch in data.for_dry_runs(config.training.batch_size)]
            model = preparing.build_model(config.model, seed=config.training.seed)
            fitted = None
            # A plan of ranks is made by the first of them.
            if not of_ranks or config.memory.budget is None:
                with _nothing_profiled():
                    fitted = self._fit(model, longest, CausalLMLoss(), config, lookup_present("cpu"), shorter)
            self._known[key] = data, fitted
        data, fitted = self._known[key]
        self._purpose.prepare_data = lambda *_, **__: data
        preparing.fit = self._own_fit if fitted is None else lambda *_: fitted
        preparing.fit_shards = self._fit_shards if fitted is None else lambda *_: replace(fitted, is_sharded=True)

    def train(self, raw: dict[str, Any], *, resume: bool) -> None:
        from tightfit.training.api import train
        from tightfit.training.config import parse_config

        train(parse_config(raw), resume=resume)


@contextmanager
def _nothing_profiled() -> Iterator[None]:
    """A context in which predictions measure nothing with profiles: Kineto starts a thread that stays, and a fork would
    not take it along.
    """
    with pytest.MonkeyPatch.context() as patch:
        for place in ("memory.process", "tracing.cpu_measured"):
            patch.setattr(f"tightfit.{place}.cpu_rise", lambda step: step() or 0)
        yield


def _serve() -> None:
    """Until nobody asks any more."""
    trainings = _Trainings()
    for line in sys.stdin:
        job = json.loads(line)
        trainings.prepare(job["config"], of_ranks="count" in job)
        gc.collect()
        gc.freeze()
        assert len(os.listdir("/proc/self/task")) == 1, "a fork takes one thread along and the locks of all"
        if "count" in job:
            ended = run_ranks(job, partial(trainings.train, job["config"], resume=job["resume"]))
            print(json.dumps(ended), flush=True)
            continue
        reader, writer = os.pipe()
        begun = time.perf_counter()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(job, trainings, writer)
        os.close(writer)
        if job["after"] is not None:
            select.select([reader], [], [], job["after"])  # it may have ended before
            os.kill(child, signal.SIGKILL)
        calls = int(os.read(reader, 64) or 0)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), calls, time.perf_counter() - begun]), flush=True)


def _child(job: dict[str, Any], trainings: _Trainings, writer: int) -> None:
    """Train as the job says, and end this process."""
    code = 1
    try:
        calls = _count_system_calls(job["at_call"])
        if "words" in job:
            said = os.open(Path(job["config"]["output"]["folder"]).parent / "said.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            command(job["words"])
        else:
            trainings.train(job["config"], resume=job["resume"])

        os.write(writer, str(calls[0]).encode())
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    finally:
        os._exit(code)


def _count_system_calls(killed_at: int | None) -> list[int]:
    """Every call through the seam of durable files is counted; this process is killed just before one."""
    from tightfit.training.checkpoint.files import Files

    calls = [0]

    def counting(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if calls[0] == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            return real(*arguments)

        return call

    for name in _SYSTEM_CALLS:
        setattr(Files, name, counting(getattr(Files, name)))
    return calls


if __name__ == "__main__":
    _serve()
