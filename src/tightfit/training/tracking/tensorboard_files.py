"""TensorBoard: event files in the run's folder, for `tensorboard --logdir runs`."""

from collections.abc import Mapping
from typing import Any

from tightfit.training.tracking.base import TrackedRun


class TensorBoard:
    """Writes scalars. A resumed run purges what was written of later steps, which run again."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._run = run
        self._writer: Any = None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writer is None:
            purge = step if self._run.is_resumed else None
            self._writer = self._make(str(self._run.folder / "tensorboard"), purge_step=purge)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run keeps what it has logged

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
