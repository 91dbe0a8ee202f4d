"""The reports of a training: of each step, and at its end."""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step.

    `loss` is that of its batch before the update. `gradient_norm` is the norm before clipping, None without clipping.
    `tokens` are those that went in so far. `memory_bytes` are what the process has resident on the CPU, and what the
    allocator has handed out on CUDA, after the step.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens: int
    tokens_per_second: float
    seconds: float
    memory_bytes: int
    skipped: bool = False  # the gradient scaler found an overflow: the weights did not move
    validation_loss: float | None = None  # on the samples held out, where this step was evaluated
    reward: float | None = None  # the mean of the completions that it learnt from

    def is_logged(self, log_every: int, max_steps: int) -> bool:
        """True if metrics.jsonl has a line of this step."""
        return self.step % log_every == 0 or self.step in (1, max_steps) or self.validation_loss is not None

    def to_json(self) -> str:
        """One line of metrics.jsonl. What is not finite becomes null: JSON has no such numbers."""
        figures = asdict(self)
        figures["grad_norm"] = figures.pop("gradient_norm")
        for name in ("validation_loss", "reward"):
            if figures[name] is None:
                del figures[name]
        return json.dumps({name: finite(value) for name, value in figures.items()}, allow_nan=False)


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a training, as result.json holds it. Bytes are ints, times in seconds.

    `plain_peak_bytes` and `predicted_peak_bytes` are predicted for the step without and with its levers,
    `measured_peak_bytes` is what the allocator recorded. `measured_step_seconds` is the median over the steps after the
    second that were not profiled, None where there was none; `tokens_per_second` rests on it, or else on all steps.
    `validation_loss` is the mean over all held-out tokens, None where nothing was held out, and `perplexity` its
    exponential where it is a cross-entropy, None where it is of preferences. An `interrupted` training is neither
    evaluated nor sampled. `skipped_lines` are bad lines of the data. `resumed_from` is the step of the checkpoint from
    which the training went on the last time, None where it ran in one go. `max_steps` are the steps that were asked
    for, None in a result of an earlier version. `host_peak_bytes` is the predicted peak of the host's memory by
    categories, or what the preparation was measured to take if that is more, and `measured_host_peak_bytes` the
    process's highest resident memory. `predicted_phase_bytes` and `measured_phase_bytes` are the peaks of the phases of
    a training on rewards, by their names; a phase that this run has not measured is left out, None without phases.
    """

    folder: str
    plain_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    budget_bytes: int | None
    first_loss: float
    last_loss: float
    validation_loss: float | None
    perplexity: float | None
    tokens_per_second: float
    predicted_step_seconds: float
    measured_step_seconds: float | None
    steps: int
    skipped_steps: int
    tokens: int
    interrupted: bool
    parameters: int
    precision: str
    device: str
    versions: dict[str, str]
    sample: str
    skipped_lines: int = 0
    resumed_from: int | None = None
    max_steps: int | None = None
    host_peak_bytes: int | None = None
    host_by_category: dict[str, int] | None = None
    measured_host_peak_bytes: int | None = None
    predicted_phase_bytes: dict[str, int] | None = None
    measured_phase_bytes: dict[str, int] | None = None

    @classmethod
    def from_json(cls, text: str) -> "TrainResult":
        """From the text of result.json, of an earlier version too. Raises `ValueError` where it is none."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("no object")
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in raw.items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from None

    def to_json(self) -> str:
        """The text of result.json."""
        return json.dumps({k: finite(v) for k, v in asdict(self).items()}, indent=1, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """None instead of a float that is infinite or not a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
