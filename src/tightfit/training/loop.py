"""The steps of a training, one after another."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from tightfit.errors import OutputError, RecoveryError
from tightfit.levers.stream import rings_on
from tightfit.memory.allocator import measured_peak
from tightfit.optim.by_name import state_tensors
from tightfit.runtime.nested import tensors_in
from tightfit.step import Loss, modules_beside
from tightfit.tracing.surroundings import held_by
from tightfit.training.config.schema import TrainingConfig
from tightfit.training.interrupt import Interrupt, Interrupted
from tightfit.training.optimizer import set_learning_rate
from tightfit.training.reporter import Reporter
from tightfit.training.result import StepMetrics
from tightfit.training.schedule import learning_rate
from tightfit.training.stepper import StepMeasured, StepOutcome, Stepper, share_of
from tightfit.training.storage import METRICS, RunFolder

SETTLED = 2  # the step from which on all steps are alike: the first one makes the optimizer's states


@dataclass
class StepHistory:
    """Mutable: what the steps so far have shown, those before a resume included."""

    steps: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    tokens: int = 0
    skipped: int = 0
    measured_peak_bytes: int = 0
    unwritten: list[str] = field(default_factory=list)  # lines of metrics that have found no room yet
    position: Mapping[str, int] | None = None  # of the batches, after the last step
    validation: tuple[int, float] | None = None  # the last step that was evaluated, and its loss
    best: tuple[int, float] | None = None  # the one with the lowest loss
    unevaluated: dict[str, Any] | None = None  # the metrics of a step whose evaluation a signal has cut
    earlier_seconds: float | None = None  # the median step before a resume
    seconds: list[float] = field(default_factory=list)
    settled_seconds: list[float] = field(default_factory=list)  # of steps that are alike and were not profiled
    is_whole: bool = True  # False: a step was cut that could not be undone

    @property
    def step_seconds(self) -> float | None:
        """Median of the settled steps that were not profiled."""
        return statistics.median(self.settled_seconds) if self.settled_seconds else self.earlier_seconds

    @property
    def tokens_per_second(self) -> float:
        seconds = self.step_seconds or statistics.median(self.seconds or [math.inf])
        return self.tokens / self.steps / seconds

    def add(self, outcome: StepOutcome, tokens: int, seconds: float) -> None:
        """A step that was made."""
        self.steps += 1
        if self.steps == 1:
            self.first_loss = outcome.loss
        self.last_loss = outcome.loss
        self.tokens += tokens
        self.skipped += outcome.skipped
        self.seconds.append(seconds)

    def held_out(self) -> float | None:
        """The loss on held-out samples after the last step, if that was evaluated."""
        return self.validation[1] if self.validation is not None and self.validation[0] == self.steps else None

    def evaluated(self, loss: float) -> None:
        """The last step's loss on held-out samples."""
        self.validation = (self.steps, loss)
        if math.isfinite(loss) and (self.best is None or loss < self.best[1]):
            self.best = self.validation

    def lines(self) -> list[str]:
        """Lines of metrics that are not written, that of a step whose evaluation was cut among them."""
        return [*self.unwritten, *([] if self.unevaluated is None else [StepMetrics(**self.unevaluated).to_json()])]

    def to_dict(self) -> dict[str, Any]:
        """The history that a resumed training goes on with, as JSON."""
        kept = (
            "steps", "first_loss", "last_loss", "tokens", "skipped", "measured_peak_bytes", "unwritten", "position",
            "validation", "best", "unevaluated",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in kept}, "earlier_seconds": self.step_seconds}


def run_steps(
    stepper: Stepper,
    batches: Iterator[dict[str, Any]],
    training: TrainingConfig,
    folder: RunFolder,
    reporter: Reporter,
    interrupt: Interrupt,
    *,
    record: StepHistory | None = None,
    save: Callable[[StepHistory], object] = lambda record: None,
    copied_bytes: Callable[[], int] = lambda: 0,
    evaluate: Callable[[], float | None] = lambda: None,
) -> StepHistory:
    """All steps after those in `record`, or those until a signal comes: it cuts a step, which is undone.

    `save` is called after each step. `copied_bytes` are those of copies for saving in the background, which lie in a
    CPU's memory during a step. `evaluate` returns the loss on held-out samples, None where there are none or where a
    signal cuts it; a resumed training makes that evaluation again.
    """
    record = StepHistory() if record is None else record
    measured = measured_steps(training.max_steps, begun=record.steps)
    watch = _Watch(training, reporter, measured, copied_bytes, is_cut=lambda: interrupt.received is not None)
    if record.unevaluated is not None:
        _conclude(StepMetrics(**record.unevaluated), record, watch, folder, evaluate)
    stepper.interrupt = interrupt
    with nullcontext() if stepper.is_sharded else interrupt.heeded_in_backward(stepper.model):
        while record.steps < training.max_steps and stepper.goes_on():
            try:
                drawn = next(batches)
            except Interrupted:  # nothing of the step has begun
                break
            try:
                metrics = _one_step(stepper, drawn, batches, record, watch)
            except Interrupted:
                record.is_whole = not stepper.ranks.any(not _undone(stepper))
                break
            _conclude(metrics, record, watch, folder, evaluate)
            save(record)
    return record


def _undone(stepper: Stepper) -> bool:
    """Undo a step that was cut; False where it wrote what cannot be put back."""
    try:
        stepper.undo()
    except RecoveryError:
        return False
    return True


class _Watch(NamedTuple):
    """The context of a step besides the stepper."""

    training: TrainingConfig
    reporter: Reporter
    measured: frozenset[int]
    copied_bytes: Callable[[], int]
    is_cut: Callable[[], bool]


def _conclude(
    metrics: StepMetrics, record: StepHistory, watch: _Watch, folder: RunFolder, evaluate: Callable[[], float | None]
) -> None:
    """Evaluate a step that was made, if it is time, and report it."""
    every = watch.training.evaluate_every
    record.unevaluated = None
    if every is not None and metrics.step % every == 0:
        loss = evaluate()
        if loss is None and watch.is_cut():
            record.unevaluated = asdict(metrics)
            return
        if loss is not None:
            record.evaluated(loss)
            metrics = replace(metrics, validation_loss=loss)
    if metrics.is_logged(watch.training.log_every, watch.training.max_steps):
        _log(metrics, record, folder, watch.reporter)
    watch.reporter.on_step(metrics)


def _log(metrics: StepMetrics, record: StepHistory, folder: RunFolder, reporter: Reporter) -> None:
    """The step's line, after those that found no room before: a full disk does not end a training."""
    record.unwritten.append(metrics.to_json())
    try:
        folder.append(METRICS, record.unwritten)
    except OutputError as error:
        if len(record.unwritten) == 1:
            reporter.on_note(f"{error}; the training goes on, and the lines wait")
    else:
        record.unwritten.clear()


def measured_steps(max_steps: int, *, begun: int = 0) -> frozenset[int]:
    """The steps whose peak is measured: the second that this process runs, and the last of all. The third step of three
    is left for the clock.
    """
    settled = min(begun + SETTLED, max_steps)
    return frozenset({settled, max_steps} if max_steps > settled + 1 else {settled})


def _one_step(
    stepper: Stepper, drawn: dict[str, Any], batches: Iterator[Any], record: StepHistory, watch: _Watch
) -> StepMetrics:
    step = record.steps + 1
    rate = learning_rate(step, watch.training)
    set_learning_rate(stepper.optimizer, rate)
    batch, tokens = share_of(drawn, stepper)
    begun, waited = time.perf_counter(), stepper.ranks.waited_seconds
    if step in watch.measured:
        outcome, peak = _measured(step, stepper, batch)
    else:
        outcome = stepper.attempt(batch, step)
        peak = _watch_cuda(len(record.seconds), stepper.device)
    if peak is not None:
        beside = 0 if stepper.device.type == "cuda" else watch.copied_bytes()
        record.measured_peak_bytes = max(record.measured_peak_bytes, peak + beside)
        watch.reporter.on_peak(record.measured_peak_bytes)
    seconds = time.perf_counter() - begun
    is_settled = len(record.seconds) >= SETTLED and step not in watch.measured
    own = seconds - (stepper.ranks.waited_seconds - waited)  # a plan does not make other ranks faster
    stepper.observe(batch, StepMeasured(step, own, peak, is_settled))
    if is_settled:
        record.settled_seconds.append(seconds)
    record.add(outcome, tokens, seconds)
    position = getattr(batches, "position", None)
    record.position = None if position is None else asdict(position)
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
        reward=getattr(batches, "reward_mean", None),
    )


def _measured(step: int, stepper: Stepper, batch: dict[str, Any]) -> tuple[StepOutcome, int]:
    """A step under the allocator's record, and its peak."""
    outcomes: list[StepOutcome] = []
    resident = resident_tensors(stepper.model, stepper.optimizer, batch, stepper.loss)
    peak = measured_peak(lambda: outcomes.append(stepper.attempt(batch, step)), resident)
    return outcomes[0], peak


def _watch_cuda(earlier: int, device: torch.device) -> int | None:
    """CUDA's allocator keeps its peak at no cost, so there every step counts that has as many earlier ones here."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" and earlier >= SETTLED else None


def memory_now(device: torch.device) -> int:
    """Bytes that the process has resident (CPU), or that the allocator has handed out (CUDA)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def resident_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Loss | None = None
) -> list[Tensor]:
    """The tensors that the model holds and those that the loss holds beside it (parameters, buffers, tensors that
    modules hold as plain attributes), the optimizer's states and the batch.

    On a CPU streamed blocks leave: the allocator's record does not see memory leave that was there at its start.
    """
    for ring in rings_on(model):
        if ring.device.type == "cpu":
            ring.leave()
    return [*held_by([model, *modules_beside(loss)]), *state_tensors(optimizer), *tensors_in(batch)]
