"""The start of `--resume`: the rules, and the newest intact checkpoint of a run's folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tightfit.errors import CheckpointError, ConfigError
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.config import Config, load_config, parse_config
from tightfit.training.reporter import Reporter
from tightfit.training.result import TrainResult
from tightfit.training.run_folders.records import leaves
from tightfit.training.storage import CONFIG, RESULT, RunFolder

# Keys that may be others when a run is resumed; a section stands for all that is in it.
CHANGEABLE = (
    "training.max_steps", "training.log_every", "training.device", "training.num_threads", "training.parallel",
    "training.rank_timeout", "memory", "checkpoint",
    "output",
)  # fmt: skip
_ABSENT = "nothing"


@dataclass(frozen=True)
class Earlier:
    """The remains of an earlier run: the checkpoint to go on from, or the result of a finished one; None where there is
    none.
    """

    checkpoint: Checkpoint | None = None
    finished: TrainResult | None = None


def look_back(config: Config, folder: RunFolder, reporter: Reporter) -> Earlier:
    """The checkpoint or result to resume in a run's folder. Nothing in it is changed.

    Raises `ConfigError` where the run was begun with another configuration, `CheckpointError` where checkpoints stand
    there and none is intact, or where more steps are asked of a finished run that left none.
    """
    written = folder.path / CONFIG
    finished = None
    if written.is_file():
        demand_same(load_config(written), config, str(written))
        finished = finished_result(folder)
        if finished is not None and config.training.max_steps <= finished.steps:
            reporter.on_note(f"{folder.path}: the run is finished, after {finished.steps} steps: nothing is left to do")
            return Earlier(finished=finished)
    found = Checkpoints(folder.checkpoints).newest_intact()
    for line in found.passed_over:
        reporter.on_note(f"passed over: {line}")
    checkpoint = found.checkpoint
    if checkpoint is None and found.passed_over:
        raise CheckpointError(
            f"{folder.checkpoints}: no checkpoint is intact ({len(found.passed_over)} passed over; "
            f"{found.passed_over[0]}): restore one, or begin anew with output.overwrite=true and without --resume"
        )
    if checkpoint is None and finished is not None:  # to begin again would replace the weights that it has made
        raise CheckpointError(
            f"{folder.path}: the run is finished, after {finished.steps} steps, and left no checkpoint from which "
            f"training.max_steps {config.training.max_steps} is reached: a finished run leaves one where "
            "checkpoint.every_steps is set; begin anew in another output.folder, or with output.overwrite=true and "
            "without --resume"
        )
    if checkpoint is None:
        reporter.on_note(f"{folder.path}: no checkpoint to resume from: the training begins at step 1")
        return Earlier()
    demand_same(parse_config(checkpoint.record["config"]), config, str(checkpoint.path))
    if checkpoint.step > config.training.max_steps:
        raise ConfigError(
            f"training.max_steps is {config.training.max_steps}, and {checkpoint.path} is beyond it: raise it, or "
            "remove that checkpoint"
        )
    reporter.on_note(f"going on from {checkpoint.path}")
    return Earlier(checkpoint)


def finished_result(folder: RunFolder) -> TrainResult | None:
    """The result of a run that has made all its steps. One that cannot be read is none."""
    try:
        result = TrainResult.from_json((folder.path / RESULT).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return None if result.interrupted else result


def demand_same(begun: Config, now: Config, where: str) -> None:
    """Raises `ConfigError` where a key differs that decides what the steps compute."""
    for key, before, after in differences(begun, now):
        if not any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE):
            raise ConfigError(
                f"{key} is {_shown(after)}, and {_shown(before)} in {where}: a resumed run keeps it; what may change "
                f"is {', '.join(CHANGEABLE)}"
            )


def differences(one: Config, other: Config) -> Iterator[tuple[str, Any, Any]]:
    """Each key whose values differ, and both values; `_ABSENT` where one has no such key."""
    # An empty section has no value that could differ from those that the other one has in it.
    first, second = ({k: v for k, v in leaves(config.model_dump(mode="json")) if v != {}} for config in (one, other))
    for key in dict.fromkeys([*first, *second]):
        before, after = first.get(key, _ABSENT), second.get(key, _ABSENT)
        if before != after:
            yield key, before, after


def _shown(value: Any) -> str:
    return value if value is _ABSENT else repr(value)
