"""The checkpoints in a folder, and the newest that is intact."""

from dataclasses import dataclass
from pathlib import Path

from tightfit.errors import CheckpointError
from tightfit.training.checkpoint.names import is_old, step_of
from tightfit.training.checkpoint.stored import Checkpoint, open_checkpoint

_TRIES = 5  # while another process saves and prunes, a list of the folder may be out of date when it is used


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest intact checkpoint, or None, and one line for each newer one: what is wrong with it."""

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...]


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint in the list: None and one line where its manifest is damaged, or a file missing or of another size.

    Its hashes are not verified.
    """

    step: int
    path: Path
    checkpoint: Checkpoint | None
    problem: str | None


def newest_intact(folder: Path) -> NewestCheckpoint:
    """Verifies every byte of a checkpoint before it is returned. Raises `CheckpointError` where the folder cannot be
    read; one that is not there has no checkpoints.
    """
    for _ in range(_TRIES):
        paths = checkpoint_paths(folder)
        passed_over = []
        for path in reversed(paths):
            try:
                checkpoint = open_checkpoint(path)
                checkpoint.verify()
            except CheckpointError as error:
                passed_over.append(str(error))
            else:
                return NewestCheckpoint(checkpoint, tuple(passed_over))
        if checkpoint_paths(folder) == paths:
            break
    return NewestCheckpoint(None, tuple(passed_over))


def listed(folder: Path) -> tuple[ListedCheckpoint, ...]:
    """By step, without reading the tensors. Raises `CheckpointError` where the folder cannot be read."""
    return tuple(_entry(path) for path in checkpoint_paths(folder))


def checkpoint_paths(folder: Path) -> list[Path]:
    """By step; of one step, the one that is being replaced before the one in its place."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be read: {error.strerror or error}: give the folder of a run"
        ) from error
    steps = {path: step for path in paths if (step := step_of(path.name)) is not None}
    return sorted(steps, key=lambda path: (steps[path], not is_old(path.name), path.name))


def _entry(path: Path) -> ListedCheckpoint:
    step = step_of(path.name)
    assert step is not None, "the list has checkpoints only"
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.check_sizes()
    except CheckpointError as error:
        return ListedCheckpoint(step, path, None, str(error))
    return ListedCheckpoint(step, path, checkpoint, None)
