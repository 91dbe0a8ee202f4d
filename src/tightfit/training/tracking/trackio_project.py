"""Trackio: a database on this machine, for `trackio show`."""

import contextlib
import importlib
import io
import os
from collections.abc import Mapping
from typing import Any

from tightfit.training.tracking.base import PROJECT, TrackedRun


class Trackio:
    """Writes to the project of `TRACKIO_PROJECT` in Trackio's own folder (`TRACKIO_DIR`).

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
