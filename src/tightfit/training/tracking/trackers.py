"""The trackers of one training: TensorBoard, Trackio, Weights & Biases.

One that fails is left out from then on, and the training goes on.
"""

import contextlib
import importlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tightfit.training.tracking.base import PROJECT, TrackedRun, Tracker, demand_packages, tracked_run

CONNECTING_SECONDS = 30  # how long the server may take before a run is written offline


class TensorBoard:
    """Writes event files in the run's folder, for `tensorboard --logdir runs`. A resumed run purges what was written of
    later steps, which run again.
    """

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


class Trackio:
    """Writes to the project of `TRACKIO_PROJECT` in Trackio's own folder (`TRACKIO_DIR`), for `trackio show`.

    Steps that a resumed run makes again are in the project already, and are left out.
    """

    def __init__(self, run: TrackedRun):
        with _quiet():
            self._trackio: Any = importlib.import_module("trackio")
            self._run = self._trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=f"{run.name}-{run.identity}",
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        self._next = getattr(self._run, "_next_step", 0)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step >= self._next:
            self._run.log(dict(figures), step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        with _quiet():
            self._trackio.finish()  # else it finishes the run again when the process ends


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Trackio prints how to see the run; stdout belongs to the outcome of the training."""
    return contextlib.redirect_stdout(io.StringIO())


class Wandb:
    """Writes to the project of `WANDB_PROJECT`: online where there is a key, else offline in the run's folder, for
    `wandb sync`. Asks for no key; `WANDB_MODE` decides where it is set.
    """

    def __init__(self, run: TrackedRun):
        wandb: Any = importlib.import_module("wandb")

        def begun(mode: str) -> Any:
            return wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                id=run.identity,
                resume="allow",
                dir=str(run.folder),
                config=dict(run.config),
                mode=mode,
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, init_timeout=CONNECTING_SECONDS
                ),
            )

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key(wandb) else "offline")
        try:
            self._run = begun(mode)
        except wandb.errors.CommError:  # the server is out of reach
            self._run = begun("offline")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()


def _has_key(wandb: Any) -> bool:
    """True if wandb finds credentials; it is told not to ask for any."""
    return bool(os.environ.get("WANDB_API_KEY")) or bool(wandb.login(prompt=False))


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
