"""Passes what a reporter is told on to the trackers of `output.track` too."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tightfit.planner.plans import Plan
from tightfit.training.config import Config
from tightfit.training.reporter import Reporter, Start
from tightfit.training.result import StepMetrics, TrainResult
from tightfit.training.storage import RunFolder
from tightfit.training.tracking.trackers import Trackers

# Of `StepMetrics`, by the names under which trackers group them.
FIGURES = {
    "loss": "train/loss",
    "validation_loss": "validation/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "tokens": "train/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/step_seconds",
    "memory_bytes": "memory/now_bytes",
}
PEAK = "memory/step_peak_bytes"
SUMMARY = ("last_loss", "validation_loss", "perplexity", "steps", "tokens", "tokens_per_second", "interrupted",
           "plain_peak_bytes", "predicted_peak_bytes", "measured_peak_bytes", "budget_bytes")  # fmt: skip


class TrackingReporter:
    """A reporter around another one. The steps that metrics.jsonl has a line of go to the trackers.

    A context manager: whatever ends the training, the trackers are closed.
    """

    def __init__(self, reporter: Reporter, config: Config, folder: RunFolder):
        self._reporter = reporter
        sections = config.model_dump(mode="json")
        self._trackers = Trackers(config.output.track, folder.path, flat(sections), reporter.on_note)
        self._training = config.training
        self._peak_bytes: int | None = None
        self._evaluated: int | None = None  # the step that was evaluated last

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trackers.close({})

    def on_note(self, line: str) -> None:
        self._reporter.on_note(line)

    def on_plan(self, plan: Plan) -> None:
        self._reporter.on_plan(plan)

    def on_start(self, start: Start) -> None:
        self._trackers.begin()
        self._reporter.on_start(start)

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.is_logged(self._training.log_every, self._training.max_steps):
            values = {shown: getattr(metrics, name) for name, shown in FIGURES.items()}
            values[PEAK] = self._peak_bytes
            self._trackers.log(metrics.step, {name: value for name, value in values.items() if value is not None})
        if metrics.validation_loss is not None:
            self._evaluated = metrics.step
        self._reporter.on_step(metrics)

    def on_peak(self, measured_peak_bytes: int) -> None:
        self._peak_bytes = measured_peak_bytes
        self._reporter.on_peak(measured_peak_bytes)

    def on_end(self, result: TrainResult) -> None:
        final = {name: getattr(result, name) for name in SUMMARY}
        if result.validation_loss is not None and self._evaluated != result.steps:
            self._trackers.log(result.steps, {FIGURES["validation_loss"]: result.validation_loss})
        self._trackers.close({name: value for name, value in final.items() if value is not None})
        self._reporter.on_end(result)


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots between: {"training.max_steps": 100, ...}."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
