"""Checkpoints of a training, when they are due and when a signal ends it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tightfit.errors import OutputError
from tightfit.training.checkpoint.background import BackgroundSaver
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.tensors import copy_bytes
from tightfit.training.config.schema import CheckpointConfig
from tightfit.training.corrections import corrections_of_all
from tightfit.training.loop import StepHistory
from tightfit.training.reporter import Reporter
from tightfit.training.sharded.saving import ShardedCheckpoints
from tightfit.training.state import State
from tightfit.training.stepper import Stepper
from tightfit.training.storage import METRICS, RunFolder
from tightfit.units import format_bytes, format_seconds

BEST = "validation_loss"  # the key of the record by which the best checkpoints are kept
_PROBE_BYTES = 8 << 20  # written once, to learn what a save takes


@dataclass
class Saver:
    """Mutable: writes the checkpoints of one training. Several ranks call it together, and rank 0 writes.

    `context` is what every checkpoint's record says beside the state, `files` go with each. `held_out_loss` is asked
    where the best checkpoints are kept. A checkpoint that cannot be written does not end a training: the reporter is
    told.
    """

    stepper: Stepper
    settings: CheckpointConfig
    folder: RunFolder
    reporter: Reporter
    context: Mapping[str, Any]
    files: Callable[[], Mapping[str, bytes]]
    max_steps: int
    held_out_loss: Callable[[], float | None] = lambda: None
    saved: int | None = None  # the step of the last checkpoint that was written, or resumed from
    copied_bytes: int = 0  # of the copies of a save in the background, which stay for the next one

    def __post_init__(self) -> None:
        folder, ranks = self.folder.checkpoints, self.stepper.ranks
        self._is_of_all = self.stepper.is_sharded  # each rank writes its own rows
        self._checkpoints = ShardedCheckpoints(folder, ranks) if self._is_of_all else Checkpoints(folder)
        runs_beside = self.settings.in_background and self.settings.every_steps is not None
        self._background = BackgroundSaver(self._checkpoints, self._prune, daemon=True) if runs_beside else None

    def announce(self, state_bytes: int) -> None:
        """Say what a signal will do, and how long its checkpoint is expected to take."""
        try:
            probe = min(state_bytes, _PROBE_BYTES)
            seconds = self.folder.seconds_to_write(probe) * max(1, state_bytes / _PROBE_BYTES)
            takes = f", which takes about {format_seconds(seconds)}"
        except OutputError:  # the disk is full now; it may have room when a signal comes
            takes = " if it finds room"
        self.reporter.on_note(
            "Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end this training with a checkpoint of "
            f"{format_bytes(state_bytes)}{takes}: go on from it with --resume"
        )

    def after_step(self, record: StepHistory) -> None:
        """A checkpoint if one is due: every so many steps, and after the last one."""
        every = self.settings.every_steps
        if every is not None and (record.steps % every == 0 or record.steps == self.max_steps):
            self.save(record)

    def save(self, record: StepHistory, *, now: bool = False) -> None:
        """Write a checkpoint; with `now` it is on its disk when this returns, and its held-out loss is left out."""
        ranks = self.stepper.ranks
        if not ranks.any(self.saved != record.steps):  # rank 0 alone knows that a save has failed
            return
        state, score = self.stepper.state.capture(), None if now else self._score(record)
        corrections = corrections_of_all(ranks, self.stepper.corrections)
        if ranks.is_first or self._is_of_all:
            self._write(record, state, score, corrections, now=now)
        else:
            self.saved = record.steps

    def _write(
        self, record: StepHistory, state: State, score: float | None, corrections: Sequence[Any], *, now: bool
    ) -> None:
        try:
            beside = {
                **self.context,
                **state.record,
                "counts": record.to_dict(),
                "metrics_bytes": self.folder.size_on_disk(METRICS),
                "corrections": corrections,
                BEST: score,
            }
            if self._background is None or now:
                self._checkpoints.save(record.steps, state.tensors, beside, self.files())
                self._prune()
            else:
                self.copied_bytes = copy_bytes(state.tensors)
                self._background.save(record.steps, state.tensors, beside, self.files())
        except OutputError as error:
            self.reporter.on_note(f"step {record.steps} has no checkpoint: {error}")
        else:
            self.saved = record.steps

    def end(self, record: StepHistory, *, is_cut: bool) -> None:
        """After the last step: what is written in the background is on its disk, and a training that a signal has ended
        has its checkpoint.
        """
        self._finish()
        self._remove_what_a_kill_left()
        if is_cut and record.is_whole:
            self.save(record, now=True)
        elif is_cut:
            self.reporter.on_note(
                f"step {record.steps + 1} was cut, and it had moved a buffer that it had not moved before: there is no "
                "checkpoint after the one that is there"
            )

    def _remove_what_a_kill_left(self) -> None:
        """A run that was killed after its last save, and before it had removed an older one, saves no more."""
        if not self.stepper.ranks.is_first or not self.folder.checkpoints.is_dir():
            return
        try:
            self._prune()
        except OutputError as error:
            self.reporter.on_note(str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """After an error, what is written in the background is on its disk. A second signal does not wait for it."""
        if kind is not None and issubclass(kind, Exception):
            self._finish()

    def _finish(self) -> None:
        try:
            if self._background is not None:
                self._background.wait()
        except OutputError as error:
            self.saved = None
            self.reporter.on_note(f"a checkpoint was not written: {error}")

    def _score(self, record: StepHistory) -> float | None:
        if not self.settings.keep_best:
            return None
        held_out = record.held_out()
        if held_out is None:
            held_out = self.held_out_loss()
        return record.last_loss if held_out is None else held_out

    def _prune(self) -> None:
        self._checkpoints.prune(self.settings.keep_last, self.settings.keep_best, metric=BEST)
