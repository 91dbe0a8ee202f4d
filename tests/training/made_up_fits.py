"""A prediction that takes no time, for trainings whose subject is something else."""

from typing import Any

import pytest

from tightfit.planner.records import StepFigures
from tightfit.tracing.record import Category
from tightfit.training import fitting
from tightfit.training.fitting import Fit


def made_up_fit(model: Any, batch: Any, loss: Any, config: Any, device: Any, shorter: Any = ()) -> Fit:
    """Of a training without a budget; planned as ever with one."""
    if config.memory.budget is not None or config.memory.recompute is not None:
        return fitting.fit(model, batch, loss, config, device, shorter)
    figures = StepFigures(
        peak_bytes=1 << 20,
        step_seconds=0.01,
        by_category={str(category): 0 for category in Category},
        phase_peaks={},
        seconds_by_phase={},
        peak_phase="forward",
        peak_module="",
        peak_operator="",
        timeline={},
        timeline_phases=(),
    )
    count = config.training.gradient_accumulation_steps
    return Fit(figures, figures, count, count, state_bytes=1 << 20, is_sharded=config.training.parallel == "fsdp2")


def leave_out_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is predicted without a budget, and no step is profiled."""
    monkeypatch.setattr("tightfit.training.preparing.fit", made_up_fit)
    monkeypatch.setattr("tightfit.training.loop.measured_peak", lambda step, resident: step() or 1)
    monkeypatch.setattr("tightfit.training.files.most_bytes", lambda fitted: 0)
