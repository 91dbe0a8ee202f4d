"""Weights & Biases: online where there is a key, else offline in the run's folder, for `wandb sync`."""

import importlib
import os
from collections.abc import Mapping
from typing import Any

from tightfit.training.tracking.base import PROJECT, TrackedRun

CONNECTING_SECONDS = 30  # how long the server may take before a run is written offline


class Wandb:
    """Writes to the project of `WANDB_PROJECT`. Asks for no key; `WANDB_MODE` decides where it is set."""

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
