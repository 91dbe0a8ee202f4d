"""Runs as records: one for a list, with curves and configuration for a comparison."""

import enum
import errno
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightfit.errors import CheckpointError, InputError
from tightfit.names import CHECKPOINTS, CONFIG, LOCK, METRICS, PLAN, RESULT
from tightfit.training.checkpoint import find
from tightfit.training.run_folders.files import Problems, count, last_metrics, metrics, number, read_json, read_yaml

LOCKS = Path("/proc/locks")  # Linux, proc_locks(5)
_HELD = (errno.EAGAIN, errno.EACCES)

DEPTH = 3  # folders below the one that is listed
MARKS = (RESULT, METRICS, PLAN, LOCK)  # any of which makes a folder a run's
_TOKENIZER = "tokenizer.json"


class RunState(enum.StrEnum):
    """The end of a run. A killed one has no result, and nobody writes there."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    KILLED = "killed"


@dataclass(frozen=True)
class RunRecord:
    """One run. Bytes are ints; None is what the folder does not say. `bytes` are those of all its files.

    `predicted_peak_bytes` is that of the step as planned, `measured_peak_bytes` the allocator's record, which a run
    without a result has not written. `checkpoints` are counted, not verified. `problems` has a line for each file that
    cannot be read.
    """

    name: str
    path: str
    state: RunState
    holder: str | None
    steps: int
    max_steps: int | None
    loss: float | None
    validation_loss: float | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    budget_bytes: int | None
    tokens_per_second: float | None
    checkpoints: int
    bytes: int
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CheckpointRecord:
    """One checkpoint. `problem` is None where it is intact: of every file there is as much as was written, and with
    `verified` every byte is the same.
    """

    step: int
    path: str
    bytes: int | None
    tensors: int | None
    validation_loss: float | None
    verified: bool
    problem: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RunCurve:
    """Losses over the steps that metrics.jsonl has a line of; validation losses where there are some."""

    name: str
    losses: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]


def runs_in(folder: str | Path) -> list[RunRecord]:
    """Every run at or below a folder, by name. Raises `InputError` where there is no such folder."""
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root}: no such folder: give one that holds runs")
    found = _runs(root, DEPTH, set())
    return [read_run(path, str(path.relative_to(root)) if path != root else str(path)) for path in found]


def run_at(folder: str | Path) -> RunRecord:
    """The run in a folder. Raises `InputError` where it holds none."""
    path = Path(folder)
    if not path.is_dir() or not is_run(path):
        raise InputError(f"{path}: holds no run: give the folder of one")
    return read_run(path, str(path))


def is_run(path: Path) -> bool:
    """True if a training has written into a folder."""
    try:
        names = set(os.listdir(path))
    except OSError:
        return False
    if names & set(MARKS) or {CONFIG, _TOKENIZER} <= names:
        return True
    return CHECKPOINTS in names and bool(_checkpoint_paths(path, Problems()))


def read_run(path: Path, name: str) -> RunRecord:
    """The record of a run, read from its folder. Contents that cannot be read raise nothing."""
    problems = Problems()
    result, last = read_json(path, RESULT, problems), last_metrics(path, problems)
    config, plan = read_yaml(path, CONFIG, problems), read_json(path, PLAN, problems)
    held = holder(path)
    if result and count(result, "steps") is None:
        problems.add(RESULT, "does not say how many steps were made")
    from_result = {} if held else result  # of an earlier part of a run that goes on now
    return RunRecord(
        name=name,
        path=str(path),
        state=_state(held, result),
        holder=held,
        steps=_first(count(from_result, "steps"), count(last, "step")) or 0,
        max_steps=count(config, "training", "max_steps"),
        loss=_first(number(from_result, "last_loss"), number(last, "loss")),
        validation_loss=_first(number(from_result, "validation_loss"), number(last, "validation_loss")),
        predicted_peak_bytes=_first(count(result, "predicted_peak_bytes"), count(plan, "peak_bytes")),
        measured_peak_bytes=count(result, "measured_peak_bytes"),
        budget_bytes=_first(count(result, "budget_bytes"), count(plan, "budget_bytes")),
        tokens_per_second=_first(number(from_result, "tokens_per_second"), number(last, "tokens_per_second")),
        checkpoints=len(_checkpoint_paths(path, problems)),
        bytes=_bytes(path, problems),
        problems=tuple(problems.lines),
    )


def checkpoints_of(folder: str | Path, *, verify: bool = False) -> list[CheckpointRecord]:
    """The checkpoints of a run by step; with `verify` every byte is read. Raises `InputError`."""
    return [_checkpoint(entry, verify) for entry in find.listed(Path(folder) / CHECKPOINTS)]


def curve_of(run: RunRecord) -> tuple[RunCurve, tuple[str, ...]]:
    """The losses of a run, and what is wrong with the file that has them."""
    problems = Problems()
    lines = metrics(Path(run.path), problems)
    losses = tuple(_points(lines, "loss"))
    validation = tuple(_points(lines, "validation_loss"))
    if run.validation_loss is not None and run.state is not RunState.RUNNING and run.steps not in dict(validation):
        validation = (*validation, (run.steps, run.validation_loss))
    return RunCurve(run.name, losses, validation), tuple(problems.lines)


def config_of(run: RunRecord) -> dict[str, Any]:
    """The configuration of a run, its keys with dots between; empty where it cannot be read."""
    return dict(leaves(read_yaml(Path(run.path), CONFIG, Problems())))


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys that are not the same in all configurations, and their values; None where one has no such key."""
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _runs(root: Path, depth: int, seen: set[Path]) -> Iterator[Path]:
    """`seen` are folders that were entered: a link may lead to one of them."""
    if root.resolve() in seen:
        return
    seen.add(root.resolve())
    if is_run(root):
        yield root
        return
    if not depth:
        return
    try:
        inner = sorted(Path(entry) for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    for path in inner:
        yield from _runs(path, depth - 1, seen)


def _state(held: str | None, result: Mapping[str, Any]) -> RunState:
    if held is not None:
        return RunState.RUNNING
    if count(result, "steps") is None:
        return RunState.KILLED
    return RunState.INTERRUPTED if result.get("interrupted") else RunState.FINISHED


def _checkpoint(entry: find.ListedCheckpoint, verify: bool) -> CheckpointRecord:
    found, problem = entry.checkpoint, entry.problem
    if found is not None and verify:
        try:
            found.verify()
        except CheckpointError as error:
            problem = str(error)
    return CheckpointRecord(
        step=entry.step,
        path=str(entry.path),
        bytes=None if found is None else found.nbytes,
        tensors=None if found is None else len(found.specs),
        validation_loss=None if found is None else number(found.record, "validation_loss"),
        verified=verify,
        problem=problem,
    )


def _checkpoint_paths(path: Path, problems: Problems) -> list[Path]:
    try:
        return find.checkpoint_paths(path / CHECKPOINTS)
    except CheckpointError as error:
        problems.add(CHECKPOINTS, str(error))
        return []


def _bytes(path: Path, problems: Problems) -> int:
    """Of all files below; one that goes meanwhile counts nothing."""
    total = 0
    failed: list[OSError] = []
    for folder, _, names in os.walk(path, onerror=failed.append):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    for error in failed:
        if not isinstance(error, FileNotFoundError):
            problems.add(str(error.filename), f"cannot be read: {error.strerror or error}")
    return total


def _points(lines: Sequence[Mapping[str, Any]], key: str) -> Iterator[tuple[int, float]]:
    for line in lines:
        step, value = count(line, "step"), number(line, key)
        if step is not None and value is not None:
            yield step, value


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration by their keys, with dots between; an empty section is a value."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def holder(folder: Path) -> str | None:
    """The writer ("process 1234 on host"); None where nobody is. A killed training leaves a file that nobody has
    locked.

    The system's list of locks is read first. The lock itself is tried only where that list cannot know: on another
    system, or where the file says that another host wrote it.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        signature = os.pread(descriptor, 256, 0).decode(errors="replace").split("\n")[0] or "a process"
        if _is_listed(os.fstat(descriptor)):
            return signature
        is_ours = signature.endswith(f" on {socket.gethostname()}")
        return None if (is_ours and LOCKS.exists()) or not _is_locked(descriptor) else signature
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_listed(file: os.stat_result) -> bool:
    """True if the system lists a lock of this file, by device and inode."""
    try:
        lines = LOCKS.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return False
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    return any(place in line.split() for line in lines if " FLOCK " in line and "->" not in line)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
