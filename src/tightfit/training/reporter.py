"""The reporters that are told how a training goes. The training itself prints nothing."""

from dataclasses import dataclass
from typing import Protocol

from tightfit.planner.plans import Plan
from tightfit.training.result import StepMetrics, TrainResult


@dataclass(frozen=True)
class Start:
    """The facts that are known before the first step. `predicted_peak_bytes` is that of the step as it will run;
    `device` is the kind that it runs on, `cpu` or `cuda`.
    """

    max_steps: int
    log_every: int
    predicted_peak_bytes: int
    predicted_step_seconds: float
    budget_bytes: int | None
    device: str = "cpu"


class Reporter(Protocol):
    """Told of each stage, in this order; `on_note` at any time, `on_plan` only where there is a budget."""

    def on_note(self, line: str) -> None:
        """Something that a person would want to know: what is being done that takes time, what could not be done."""

    def on_plan(self, plan: Plan) -> None: ...

    def on_start(self, start: Start) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None:
        """After every step, logged or not."""

    def on_peak(self, measured_peak_bytes: int) -> None:
        """The highest peak measured so far."""

    def on_end(self, result: TrainResult) -> None: ...


class SilentReporter:
    """Nobody is told anything."""

    def on_note(self, line: str) -> None: ...

    def on_plan(self, plan: Plan) -> None: ...

    def on_start(self, start: Start) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_peak(self, measured_peak_bytes: int) -> None: ...

    def on_end(self, result: TrainResult) -> None: ...
