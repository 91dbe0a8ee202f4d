"""The steps of a training, one after another."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from tightfit.config.schema import TrainingConfig
from tightfit.errors import OutputError
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.step import Loss, StepSettings, forward_backward, update
from tightfit.training.interrupt import Interrupt
from tightfit.training.measure import measured_peak, resident_tensors
from tightfit.training.objective import counted
from tightfit.training.optimizer import set_learning_rate
from tightfit.training.reporter import Reporter
from tightfit.training.result import StepMetrics
from tightfit.training.schedule import learning_rate
from tightfit.training.storage import METRICS, RunFolder

SETTLED = 2  # the step from which on all steps are alike: the first one makes the optimizer's states


class StepOutcome(NamedTuple):
    """What one optimizer step leaves: the batch's loss before it, the gradients' norm, whether it was skipped."""

    loss: float
    gradient_norm: float | None
    skipped: bool


@dataclass
class Stepper:
    """Runs optimizer steps on one model. The model, the optimizer and the scaler are what moves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    settings: StepSettings
    micro_batches: int
    micro_batches_for: Callable[[int], int] | None = None  # by the tokens of a row, where it depends on them

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type) if self.settings.precision == "fp16" else None

    def step(self, batch: Mapping[str, Any]) -> StepOutcome:
        """One batch in its micro-batches: gradients, clipping, update."""
        parts = as_parts(split_batch(batch, self.count_for(batch)), self.loss)
        value = forward_backward(self.model, parts, self.loss, self.settings.precision, scaler=self.scaler)
        scale = None if self.scaler is None else self.scaler.get_scale()
        norm = update(self.model, self.optimizer, self.settings, scaler=self.scaler)
        # The scaler lowers its scale after an overflow, and only then.
        skipped = self.scaler is not None and scale is not None and self.scaler.get_scale() < scale
        return StepOutcome(float(value), None if norm is None else float(norm), skipped)

    def count_for(self, batch: Mapping[str, Any]) -> int:
        """The micro-batches of a batch."""
        if self.micro_batches_for is None:
            return self.micro_batches
        return self.micro_batches_for(batch["input_ids"].shape[1])


@dataclass
class Record:
    """Mutable: what the steps so far have shown."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    settled_seconds: list[float] = field(default_factory=list)  # of steps that are alike and were not profiled
    tokens: int = 0
    skipped: int = 0
    measured_peak_bytes: int = 0
    unwritten: list[str] = field(default_factory=list)  # lines of metrics that have found no room yet

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def step_seconds(self) -> float | None:
        """Median of the settled steps that were not profiled."""
        return statistics.median(self.settled_seconds) if self.settled_seconds else None

    @property
    def tokens_per_second(self) -> float:
        seconds = self.step_seconds or statistics.median(self.seconds)
        return self.tokens / self.steps / seconds


def run_steps(
    stepper: Stepper,
    batches: Iterator[dict[str, Any]],
    training: TrainingConfig,
    folder: RunFolder,
    reporter: Reporter,
    interrupt: Interrupt,
) -> Record:
    """All steps, or those until the user interrupts; a step that has begun is finished."""
    record = Record()
    for step in range(1, training.max_steps + 1):
        metrics = _one_step(step, stepper, counted(next(batches), stepper.device), training, record, reporter)
        if step % training.log_every == 0 or step in (1, training.max_steps):
            _log(metrics, record, folder, reporter)
        reporter.on_step(metrics)
        if interrupt.received:
            break
    return record


def _log(metrics: StepMetrics, record: Record, folder: RunFolder, reporter: Reporter) -> None:
    """The step's line, after those that found no room before: a full disk does not end a training."""
    record.unwritten.append(metrics.to_json())
    try:
        folder.append(METRICS, record.unwritten)
    except OutputError as error:
        if len(record.unwritten) == 1:
            reporter.on_note(f"{error}; the training goes on, and the lines wait")
    else:
        record.unwritten.clear()


def measured_steps(max_steps: int) -> frozenset[int]:
    """The steps whose peak is measured: the second and the last. The third step of three is left for the clock."""
    settled = min(SETTLED, max_steps)
    return frozenset({settled, max_steps} if max_steps > SETTLED + 1 else {settled})


def _one_step(
    step: int,
    stepper: Stepper,
    batch: dict[str, Any],
    training: TrainingConfig,
    record: Record,
    reporter: Reporter,
) -> StepMetrics:
    rate = learning_rate(step, training)
    set_learning_rate(stepper.optimizer, rate)
    begun = time.perf_counter()
    if step in measured_steps(training.max_steps):
        outcome = _measured(stepper, batch, record)
        reporter.on_peak(record.measured_peak_bytes)
    else:
        outcome = stepper.step(batch)
        _watch_cuda(step, stepper.device, record)
    seconds = time.perf_counter() - begun
    tokens = batch["input_ids"].numel()
    if step > SETTLED and step not in measured_steps(training.max_steps):
        record.settled_seconds.append(seconds)
    record.seconds.append(seconds)
    record.losses.append(outcome.loss)
    record.tokens += tokens
    record.skipped += outcome.skipped
    return StepMetrics(
        step=step,
        loss=outcome.loss,
        learning_rate=rate,
        gradient_norm=outcome.gradient_norm,
        tokens=record.tokens,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        memory_bytes=memory_now(stepper.device),
        skipped=outcome.skipped,
    )


def _measured(stepper: Stepper, batch: dict[str, Any], record: Record) -> StepOutcome:
    """A step under the allocator's record."""
    outcomes: list[StepOutcome] = []
    resident = resident_tensors(stepper.model, stepper.optimizer, batch)
    peak = measured_peak(lambda: outcomes.append(stepper.step(batch)), resident)
    record.measured_peak_bytes = max(record.measured_peak_bytes, peak)
    return outcomes[0]


def _watch_cuda(step: int, device: torch.device, record: Record) -> None:
    """CUDA's allocator keeps its peak at no cost, so there every settled step counts."""
    if device.type == "cuda" and step > SETTLED:
        record.measured_peak_bytes = max(record.measured_peak_bytes, torch.cuda.max_memory_allocated(device))


def memory_now(device: torch.device) -> int:
    """Bytes that the process has resident (CPU), or that the allocator has handed out (CUDA)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss
