"""The outcome of a training: its result, from the prediction and from what its steps have shown."""

import math
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tightfit.memory.counters import highest_rss
from tightfit.ops.weights.low_bit import count_weights
from tightfit.training.config import Config
from tightfit.training.fitting import Fit
from tightfit.training.loop import StepHistory
from tightfit.training.objective import Objective
from tightfit.training.result import TrainResult
from tightfit.training.rollouts import UPDATE
from tightfit.version import package_version


def result_of(
    config: Config,
    model: nn.Module,
    fitted: Fit,
    record: StepHistory,
    *,
    is_cut: bool,
    validation: float | None,
    held_out: Objective,
    device: str,
    sample: str,
    skipped_lines: int,
    resumed_from: int | None,
    host_by_category: Mapping[str, int],
    predicted_phases: Mapping[str, int],
    measured_phases: Mapping[str, int],
) -> TrainResult:
    """The result of a training that has made at least one step. `validation` is what `held_out` found."""
    return TrainResult(
        folder=str(Path(config.output.folder)),
        plain_peak_bytes=fitted.plain.peak_bytes,
        predicted_peak_bytes=fitted.peak_bytes,
        measured_peak_bytes=record.measured_peak_bytes,
        budget_bytes=fitted.whole_budget_bytes,
        first_loss=record.first_loss,
        last_loss=record.last_loss,
        validation_loss=validation,
        perplexity=None if validation is None or not held_out.is_cross_entropy else _exponential(validation),
        tokens_per_second=record.tokens_per_second,
        predicted_step_seconds=fitted.planned.step_seconds,
        measured_step_seconds=record.step_seconds,
        steps=record.steps,
        skipped_steps=record.skipped,
        tokens=record.tokens,
        interrupted=is_cut,
        parameters=count_weights(model),
        precision=config.training.precision,
        device=device,
        versions={"tightfit": package_version(), "torch": torch.__version__, "python": platform.python_version()},
        sample=sample,
        skipped_lines=skipped_lines,
        resumed_from=resumed_from,
        max_steps=config.training.max_steps,
        host_peak_bytes=sum(host_by_category.values()),
        host_by_category=dict(host_by_category),
        measured_host_peak_bytes=highest_rss(),
        predicted_phase_bytes=dict(predicted_phases) or None,
        measured_phase_bytes=({**measured_phases, UPDATE: record.measured_peak_bytes} if predicted_phases else None),
    )


def _exponential(loss: float) -> float:
    """Infinite where it is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
