"""The trackers of one training. One that fails is left out from then on, and the training goes on."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tightfit.training.tracking.base import TrackedRun, Tracker, demand_packages, tracked_run
from tightfit.training.tracking.tensorboard_files import TensorBoard
from tightfit.training.tracking.trackio_project import Trackio
from tightfit.training.tracking.wandb_run import Wandb

KINDS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}


class Trackers:
    """Mutable: the trackers that still work, by name. `note` is told of each that fails.

    Raises `ConfigError` where a package is missing. Nothing is written before `begin`.
    """

    def __init__(self, names: Sequence[str], run_folder: Path, config: Mapping[str, Any], note: Callable[[str], None]):
        demand_packages(names)
        self._names, self._folder, self._config, self._note = tuple(dict.fromkeys(names)), run_folder, config, note
        self._open: dict[str, Tracker] = {}

    def begin(self) -> None:
        """Open all, once the run's folder is this training's."""
        if not self._names:
            return
        try:
            run = tracked_run(self._folder, self._config)
        except OSError as error:
            self._note(f"output.track: {error}: the training goes on without trackers")
            return
        for name in self._names:
            self._attempt(name, lambda name=name: self._open.__setitem__(name, KINDS[name](run)))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, tracker in list(self._open.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(step, figures))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Close all; again, nothing."""
        for name, tracker in list(self._open.items()):
            self._attempt(name, lambda tracker=tracker: tracker.close(summary))
            self._open.pop(name, None)

    def _attempt(self, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # whatever somebody else's package raises: no training is worth less than its curve
            self._open.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._note(f"output.track: {name} failed ({reason}): the training goes on without it")
