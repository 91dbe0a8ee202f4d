"""Out of memory in a training: the step is undone, a tighter plan is made, and the same samples run again.

Until backward has ended, a step has changed no weight: gradients are dropped, random states and what modules hold are
put back (`recovery.step_state`), and the step runs again under the next tighter plan. After that it is not undone but
finished: the update goes on where it stopped, one parameter at a time (`recovery.update`), which no plan could make
smaller. A plan may split the batch in more micro-batches: their gradients add up to the batch's, token for token, and
the schedule counts optimizer steps, so neither moves.

Of several ranks each recovers by itself while the others wait for its gradients: a plan changes how a rank computes its
share of the batch, and not the share.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit
from tightfit.optim.in_backward import steps_in_backward
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.step import Loss
from tightfit.training.config.schema import Config
from tightfit.training.corrections import Corrections
from tightfit.training.fitting import Fit, LeversInForce, fit_within, plain_peak_bytes
from tightfit.training.joining import CANNOT_FIT, agree
from tightfit.training.objective import on_device
from tightfit.training.recovery.catching import Failure, caught, insist
from tightfit.training.recovery.tightening import next_plan, run_until_it_fits, tighter
from tightfit.training.recovery.update import FINISHED, UpdateGuard, carry_out
from tightfit.training.slowdown import Pace, TimedStep
from tightfit.training.stepper import StepMeasured, StepOutcome, Stepper, StepUnderWay
from tightfit.units import format_bytes

NOTED = 0.001  # of the predicted peak: a measured one that is more above it is reported


@dataclass(frozen=True)
class StepPlanner:
    """Plans the step of one training for a budget: on `longest`, which stands for all batches, or on the one given."""

    model: nn.Module
    loss: Loss
    config: Config
    device: DeviceSpec
    longest: Mapping[str, Any] | None = None

    def within(
        self,
        batch: Mapping[str, Any],
        budget_bytes: int,
        *,
        levers: Collection[str] | None = None,
        overhead: float = 1.0,
    ) -> Fit:
        """The fastest plan within so many bytes, with `levers` only, the executor's overhead priced that many times as
        high. Raises `CannotFit`.
        """
        device = self.device
        if overhead != 1.0:
            recording, replaying = device.recording_seconds * overhead, device.replaying_seconds * overhead
            device = replace(device, recording_seconds=recording, replaying_seconds=replaying)
        batch = on_device(batch, "cpu") if self.longest is None else self.longest
        return fit_within(budget_bytes, self.model, batch, self.loss, self.config, device, levers=levers)

    def plain_peak_bytes(self, batch: Mapping[str, Any]) -> int:
        """The predicted peak without levers, in one micro-batch."""
        return plain_peak_bytes(self.model, on_device(batch, "cpu"), self.loss, self.config, self.device)


@dataclass
class RecoveringStepper(Stepper):
    """A stepper that recovers from out of memory. Mutable: what it has learnt (`corrections`), the levers in force."""

    levers: LeversInForce
    planner: StepPlanner
    note: Callable[[str], None]
    corrections: Corrections = field(default_factory=Corrections)
    max_slowdown: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pace = Pace(self.max_slowdown)
        self._failed = 0  # the last step that ran out of memory
        self._reported_bytes = 0

    def attempt(self, batch: Mapping[str, Any], number: int) -> StepOutcome:
        """Step `number`, whatever it takes.

        Raises `CannotFit` where no tighter plan is left, `RecoveryError` where the step cannot be undone or finished.
        """
        # A step in backward updates weights before the gradients are complete.
        guard = UpdateGuard(self.optimizer) if steps_in_backward(self.optimizer) else None
        step = self._with_gradients(batch, number, guard)
        self._updated(step, number, guard or UpdateGuard(self.optimizer))
        insist(step.end, self.device)
        return insist(step.outcome, self.device)

    def observe(self, batch: Mapping[str, Any], step: StepMeasured) -> None:
        """Hold what was measured of a step against what was predicted, and correct the plan where it is off."""
        if self._failed == step.number:  # the figures are of several attempts
            return
        if step.peak_bytes is not None:
            self._watch_budget(batch, step.number, step.peak_bytes)
        if step.is_settled and self.levers.fitted.plan is not None:
            self._watch_pace(batch, step)

    # A step that fails before its gradients are complete

    def _with_gradients(self, batch: Mapping[str, Any], number: int, guard: UpdateGuard | None) -> StepUnderWay:
        steps: list[StepUnderWay] = []  # none while a plan is made: nothing of the failed step is held

        def attempt() -> Failure | None:
            step = StepUnderWay(self, batch)
            insist(self._state.remember, self.device)
            failure = caught(step.compute_gradients, self.device)
            if failure is None:
                step.join()
                insist(self._state.settle, self.device)
                steps.append(step)
            return failure

        def undo() -> None:
            if guard is not None:
                guard.check()
                guard.forget_unused_states()
            self.undo()

        run_until_it_fits(attempt, undo, partial(self._tighten, batch, number), self.device)
        return steps[0]

    def _tighten(self, batch: Mapping[str, Any], number: int, failure: Failure, tried: Sequence[int]) -> int:
        """Put the next tighter plan in force. Returns the peak of the one before; raises `CannotFit` for none."""
        before = self.levers.fitted.planned.peak_bytes
        todo = "lower training.batch_size or data.sequence_length, or allow more levers in memory.levers"
        try:
            with self.levers.taken_off():
                found = next_plan(
                    partial(self.planner.within, batch), failure, [*tried, before], f"step {number}", todo
                )
        except CannotFit:
            if self.ranks.is_several:
                agree(self.ranks, self.model, CANNOT_FIT)
            raise
        self._put_in_force(found, found.planned.peak_bytes)
        self.corrections = replace(self.corrections, failures=self.corrections.failures + 1)
        self._failed = number
        self.note(
            f"step {number}: {failure}; it is undone and runs again with a tighter plan: "
            f"{format_bytes(found.planned.peak_bytes)} instead of {format_bytes(before)}, "
            f"{found.words()}; batch and schedule stay unchanged"
        )
        self._state.put_back_random()
        return before

    def _put_in_force(self, fitted: Fit, bound_bytes: int | None) -> None:
        assert fitted.plan is not None, "only plans are put in force"
        budget = self.levers.fitted.budget_bytes  # the user's, not the bound
        if budget is not None:
            fitted = replace(fitted, plan=replace(fitted.plan, budget_bytes=budget))
        self.levers.replace(fitted)
        self.micro_batches, self.micro_batches_for = fitted.micro_batches, None  # a new plan sizes no buckets
        assert fitted.plan is not None
        self.corrections = replace(self.corrections, plan=fitted.plan, bound_bytes=bound_bytes)
        self._pace.begin_again()
        self._reported_bytes = 0
        self._forget_peak()

    def _forget_peak(self) -> None:
        """Let the next measured peak be that of steps alone, and not of plans that were made or tried since."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    # A step that fails in its update

    def _updated(self, step: StepUnderWay, number: int, guard: UpdateGuard) -> None:
        def failed(failure: Failure) -> None:
            self._failed = number
            if not self.corrections.one_by_one:
                self.corrections = replace(self.corrections, one_by_one=True)
                self.note(f"step {number}: {failure}{FINISHED}")

        carry_out(guard, step.update, self.device, single=self.corrections.one_by_one, failed=failed)

    # A step that was done

    def _watch_budget(self, batch: Mapping[str, Any], number: int, peak: int) -> None:
        fitted = self.levers.fitted
        predicted, budget = fitted.peak_bytes - fitted.copy_bytes, fitted.budget_bytes  # the copy lies beside the step
        if peak <= max(predicted * (1 + NOTED) + UNSEEN_BYTES, self._reported_bytes):
            return
        self._reported_bytes = peak
        surplus = peak - predicted
        above = f"step {number}: the measured peak is {format_bytes(peak)}, {surplus:,} bytes above the predicted one"
        if budget is None or peak <= budget:
            self.note(above)
            return
        with self.levers.taken_off():
            found = tighter(partial(self.planner.within, batch), budget - surplus, predicted)
        self._forget_peak()
        if found is None:
            self.note(f"{above} and beyond the budget of {format_bytes(budget)}; there is no tighter plan")
            return
        self._put_in_force(found, found.planned.peak_bytes)
        self.note(
            f"{above} and beyond the budget of {format_bytes(budget)}; a plan takes over that leaves room for it: "
            f"{format_bytes(found.planned.peak_bytes)}, {found.words()}"
        )

    def _watch_pace(self, batch: Mapping[str, Any], step: StepMeasured) -> None:
        if not self._pace.is_slow(step.seconds, self.levers.fitted.plain.step_seconds):
            return
        timed = TimedStep(self, self._state, self.levers, self.planner.plain_peak_bytes)
        found = self._pace.loosened(timed, self.planner.within, batch, self.corrections)
        self._forget_peak()
        if found.fitted is not None:
            self._put_in_force(found.fitted, None if found.gives_back is None else found.gives_back)
            self.corrections = replace(self.corrections, loosened=self.corrections.loosened + 1)
        if found.line:
            self.note(f"step {step.number}: {found.line}")
