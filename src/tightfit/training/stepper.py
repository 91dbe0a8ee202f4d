"""One optimizer step of a training, stage by stage, and what runs it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tightfit.levers.micro_batch import IGNORE_INDEX, as_parts, inseparable_samples, split_batch
from tightfit.models.masks import enforce_masks
from tightfit.optim.in_backward import steps_in_backward
from tightfit.ranks.processes.ranks import ALONE, Ranks
from tightfit.runtime.internals import forget_unscaled
from tightfit.step import Loss, StepSettings, clip, forward_backward, let_go
from tightfit.training.corrections import Corrections
from tightfit.training.interrupt import Interrupt, Interrupted
from tightfit.training.joining import agree, join
from tightfit.training.objective import counted, on_device
from tightfit.training.recovery.step_state import StepState
from tightfit.training.state import TrainingState


class StepOutcome(NamedTuple):
    """The outcome of one optimizer step: the batch's loss before it, the gradients' norm, whether it was skipped."""

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

    A signal cuts a step before its update (`Interrupted`); an update that has begun is finished. `corrections` are what
    one that recovers has learnt, for checkpoints.
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
    frozen: str | None = field(default=None, kw_only=True)  # of `TrainingState`
    corrections = Corrections()  # no field: those of a stepper that recovers are one
    is_sharded = False  # whether all ranks compute each step together, those too that have no sample

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type) if self.settings.precision == "fp16" else None
        self._state = StepState(self.model)

    @property
    def state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizer, self.scaler, self.ranks, self.frozen)

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
        """True if there is a next step. Of several ranks, a signal that came to one of them cuts the next step of all,
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
    """The measurements of one step. `peak_bytes` is None where nobody looked; `seconds` are of a step like all others
    if it `is_settled`.
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
        """The gradients of all ranks, where there are several, clipped on their norm. Raises `Interrupted` where a
        signal has cut another rank's step.
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
        """The result of `work`. Raises `Interrupted`, of which the other ranks know then."""
        stepper = self._stepper
        try:
            return stepper.interrupt.cuttable(work)
        except Interrupted:
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
        """The outcome of the step."""
        assert self._loss is not None, "the gradients were computed"
        scaler = self._stepper.scaler
        # The scaler lowers its scale after an overflow, and only then.
        skipped = scaler is not None and self._scale is not None and scaler.get_scale() < self._scale
        return StepOutcome(float(self._loss), None if self._norm is None else float(self._norm), skipped)


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
