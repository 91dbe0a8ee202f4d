"""The steps of a training, one after another."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from tightfit.config.schema import TrainingConfig
from tightfit.errors import OutputError, RecoveryError
from tightfit.levers.micro_batch import IGNORE_INDEX, as_parts, inseparable_samples, split_batch
from tightfit.models.masks import enforce_masks
from tightfit.optim.in_backward import steps_in_backward
from tightfit.processes.ranks import ALONE, Ranks
from tightfit.recovery.step_state import StepState
from tightfit.runtime.internals import forget_unscaled
from tightfit.step import Loss, StepSettings, clip, forward_backward, let_go
from tightfit.training.corrections import Corrections
from tightfit.training.interrupt import Cut, Interrupt
from tightfit.training.joining import agree, join
from tightfit.training.measure import measured_peak, resident_tensors
from tightfit.training.objective import counted, on_device
from tightfit.training.optimizer import set_learning_rate
from tightfit.training.reporter import Reporter
from tightfit.training.result import StepMetrics
from tightfit.training.schedule import learning_rate
from tightfit.training.state import TrainingState
from tightfit.training.storage import METRICS, RunFolder

SETTLED = 2  # the step from which on all steps are alike: the first one makes the optimizer's states


class StepOutcome(NamedTuple):
    """What one optimizer step leaves: the batch's loss before it, the gradients' norm, whether it was skipped."""

    loss: float
    gradient_norm: float | None
    skipped: bool


class _UntilWeightsMove:
    """Told of each backward: with a step in backward, the last one of a batch updates the weights, and is finished."""

    def __init__(self, interrupt: Interrupt, micro_batches: int):
        self._interrupt, self._left = interrupt, micro_batches

    def phase(self, name: str) -> AbstractContextManager[Any]:
        if name == "backward":
            self._left -= 1
            if self._left == 0:
                self._interrupt.finish()
        return nullcontext()


@dataclass
class Stepper:
    """Runs optimizer steps on one model. The model, the optimizer and the scaler are what moves.

    A signal cuts a step before its update (`Cut`); an update that has begun is finished. `corrections` are what one
    that recovers has learnt, for checkpoints.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    settings: StepSettings
    micro_batches: int
    # By the tokens of a row, where it depends on them.
    micro_batches_for: Callable[[int], int] | None = field(default=None, kw_only=True)
    interrupt: Interrupt = field(default_factory=Interrupt, kw_only=True)
    ranks: Ranks = field(default=ALONE, kw_only=True)
    corrections = Corrections()  # no field: those of a stepper that recovers are one
    is_sharded = False  # whether all ranks compute each step together, those too that have no sample

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type) if self.settings.precision == "fp16" else None
        self._state = StepState(self.model)

    @property
    def state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizer, self.scaler, self.ranks)

    def step(self, batch: Mapping[str, Any]) -> StepOutcome:
        """One batch in its micro-batches: gradients, clipping, update."""
        step = StepUnderWay(self, batch)
        self._state.remember()
        step.compute_gradients()
        step.join()
        self._state.settle()
        step.update()
        step.end()
        return step.outcome()

    def count_for(self, batch: Mapping[str, Any]) -> int:
        """The micro-batches of a batch. Of several ranks, one may have fewer samples than another."""
        count = self.micro_batches
        if self.micro_batches_for is not None:
            count = self.micro_batches_for(batch["input_ids"].shape[1])
        return min(count, inseparable_samples(batch, self.loss)) if self.ranks.is_several else count

    def undo(self) -> None:
        """After a signal has cut a step in `compute_gradients`: everything as it was before the step. Can be called
        again. Raises `RecoveryError` where the step has written what no step before it had written.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.scaler is not None:
            forget_unscaled(self.scaler)
        self._state.put_back()

    def goes_on(self) -> bool:
        """Whether there is a next step. Of several ranks, a signal that came to one of them cuts the next step of all,
        so that they end together.
        """
        return self.ranks.is_several or self.interrupt.received is None

    def attempt(self, batch: Mapping[str, Any], number: int) -> StepOutcome:
        """Step `number` of the training; a stepper that recovers from out of memory does so here."""
        return self.step(batch)

    def observe(self, batch: Mapping[str, Any], step: "StepMeasured") -> None:
        """Told of each step that is done, with what was measured of it."""


@dataclass(frozen=True)
class StepMeasured:
    """What was measured of one step. `peak_bytes` is None where nobody looked; `seconds` are of a step like all
    others if it `is_settled`.
    """

    number: int
    seconds: float
    peak_bytes: int | None
    is_settled: bool


class StepUnderWay:
    """One optimizer step, stage by stage. Mutable: what the stages so far have found.

    After out of memory, one that recovers goes on with the stage that failed (`RecoveringStepper`).
    """

    def __init__(self, stepper: Stepper, batch: Mapping[str, Any]):
        self._stepper, self._batch = stepper, batch
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._scale: float | None = None
        self._is_scaled = False  # the scaler has the scale of the next step

    def compute_gradients(self) -> None:
        """Those of the batch in its micro-batches, clipped unless `join` does it."""
        stepper = self._stepper
        if stepper.ranks.is_several and not len(self._batch["input_ids"]):
            self._without_samples()
            return
        parts = as_parts(split_batch(self._batch, stepper.count_for(self._batch)), stepper.loss)
        precision, scaler = stepper.settings.precision, stepper.scaler
        in_backward = steps_in_backward(stepper.optimizer)
        watched = _UntilWeightsMove(stepper.interrupt, len(parts)) if in_backward else None
        self._loss = self._cuttable(
            lambda: forward_backward(stepper.model, parts, stepper.loss, precision, scaler=scaler, observer=watched)
        )
        if not stepper.ranks.is_several:
            self._clip()

    def join(self) -> None:
        """The gradients of all ranks, where there are several, clipped on their norm. Raises `Cut` where a signal has
        cut another rank's step.
        """
        stepper = self._stepper
        if stepper.ranks.is_several:
            assert self._loss is not None, "the gradients were computed"
            self._loss = join(stepper.ranks, stepper.model, self._loss, stepper.interrupt)
            self._clip()

    def _clip(self) -> None:
        stepper, scaler = self._stepper, self._stepper.scaler
        self._scale = None if scaler is None else scaler.get_scale()
        self._norm = clip(stepper.model, stepper.optimizer, stepper.settings, scaler)

    def _cuttable(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `work` returns. Raises `Cut`, of which the other ranks know then."""
        stepper = self._stepper
        try:
            return stepper.interrupt.cuttable(work)
        except Cut:
            if stepper.ranks.is_several:
                assert stepper.interrupt.received is not None, "a signal cuts"
                agree(stepper.ranks, stepper.model, int(stepper.interrupt.received))
            raise

    def _without_samples(self) -> None:
        """The share of a rank that the batch has no sample for: no gradients, and a loss of zero."""
        scaler, device = self._stepper.scaler, self._stepper.device
        nothing = torch.zeros((), device=device)
        self._loss = self._cuttable(lambda: nothing if scaler is None else scaler.scale(nothing))

    def update(self, run: Callable[[Callable[[], Any]], Any] = lambda step: step()) -> None:
        """The optimizer's step; `run` is given it and calls it."""
        optimizer, scaler = self._stepper.optimizer, self._stepper.scaler
        if scaler is None:
            run(optimizer.step)
            return
        step = optimizer.step
        optimizer.step = lambda *arguments, **options: run(partial(step, *arguments, **options))
        try:
            scaler.step(optimizer)
        finally:
            del optimizer.step

    def end(self) -> None:
        """Masked weights at zero, the scale of the next step, and no gradients. Can be called again where it failed."""
        enforce_masks(self._stepper.model)
        if self._stepper.scaler is not None and not self._is_scaled:
            self._stepper.scaler.update()
            self._is_scaled = True
        let_go(self._stepper.optimizer, self._stepper.settings)

    def outcome(self) -> StepOutcome:
        """What the step leaves."""
        assert self._loss is not None, "the gradients were computed"
        scaler = self._stepper.scaler
        # The scaler lowers its scale after an overflow, and only then.
        skipped = scaler is not None and self._scale is not None and scaler.get_scale() < self._scale
        return StepOutcome(float(self._loss), None if self._norm is None else float(self._norm), skipped)


@dataclass
class Record:
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
        """What a resumed training goes on with, as JSON."""
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
    record: Record | None = None,
    save: Callable[[Record], object] = lambda record: None,
    copied_bytes: Callable[[], int] = lambda: 0,
    evaluate: Callable[[], float | None] = lambda: None,
) -> Record:
    """All steps after those in `record`, or those until a signal comes: it cuts a step, which is undone.

    `save` is called after each step. `copied_bytes` are those of copies for saving in the background, which lie in a
    CPU's memory during a step. `evaluate` returns the loss on held-out samples, None where there are none or where a
    signal cuts it; a resumed training makes that evaluation again.
    """
    record = Record() if record is None else record
    measured = measured_steps(training.max_steps, begun=record.steps)
    watch = _Watch(training, reporter, measured, copied_bytes, is_cut=lambda: interrupt.received is not None)
    if record.unevaluated is not None:
        _conclude(StepMetrics(**record.unevaluated), record, watch, folder, evaluate)
    stepper.interrupt = interrupt
    with nullcontext() if stepper.is_sharded else interrupt.heeded_in_backward(stepper.model):
        while record.steps < training.max_steps and stepper.goes_on():
            try:
                metrics = _one_step(stepper, batches, record, watch)
            except Cut:
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
    """What a step needs to know besides the stepper."""

    training: TrainingConfig
    reporter: Reporter
    measured: frozenset[int]
    copied_bytes: Callable[[], int]
    is_cut: Callable[[], bool]


def _conclude(
    metrics: StepMetrics, record: Record, watch: _Watch, folder: RunFolder, evaluate: Callable[[], float | None]
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


def measured_steps(max_steps: int, *, begun: int = 0) -> frozenset[int]:
    """The steps whose peak is measured: the second that this process runs, and the last of all. The third step of three
    is left for the clock.
    """
    settled = min(begun + SETTLED, max_steps)
    return frozenset({settled, max_steps} if max_steps > settled + 1 else {settled})


def _one_step(stepper: Stepper, batches: Iterator[dict[str, Any]], record: Record, watch: _Watch) -> StepMetrics:
    step = record.steps + 1
    rate = learning_rate(step, watch.training)
    set_learning_rate(stepper.optimizer, rate)
    batch, tokens = share_of(next(batches), stepper)
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
    )


def share_of(batch: Mapping[str, Any], stepper: Stepper) -> tuple[dict[str, Any], int]:
    """This rank's rows of a batch, with the counts of the whole one, and the tokens of the whole one."""
    tokens = batch["input_ids"].numel()
    if not stepper.ranks.is_several:
        return counted(batch, stepper.device), tokens
    whole, together = counted(batch), getattr(stepper.loss, "rows_together", 1)
    own = stepper.ranks.share(len(batch["input_ids"]) // together)
    rows = slice(own.start * together, own.stop * together)
    is_idle = stepper.is_sharded and not len(own)
    if is_idle:  # it computes all the same, and learns nothing: a sample whose labels are ignored
        rows = slice(0, together)
    # Copies: a view would keep the whole batch in memory.
    part = {n: value[rows].clone() if isinstance(value, torch.Tensor) else value for n, value in whole.items()}
    return on_device(without_labels(part) if is_idle else part, stepper.device), tokens


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with nothing to learn."""
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}


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
