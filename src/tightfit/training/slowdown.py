"""A plan that is slower than it should be: measured, and replaced by a looser one if that is faster.

The plain step cannot be timed where it does not fit. So the slowdown is measured on as many samples of a batch as fit
without a plan: their forward and backward, plain and planned, one after the other on the same machine in the same
state. That the steps take longer than predicted is only the reason to look: a busy machine slows both alike.

A plan is already the fastest one by predicted seconds. A looser one is found by what was measured: without offload, or
with the executor's overhead priced as measured, or, where out of memory has tightened the plan, with half of what was
taken given back. Unless memory ran out before, it computes the same bits as the plan in force: a training's numbers
do not depend on the clock.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tightfit.errors import CannotFit, LeverError
from tightfit.levers.micro_batch import as_parts, batch_size, inseparable_samples, split_batch
from tightfit.planner.levers import Offload, lever_types
from tightfit.planner.levers.base import Exactness
from tightfit.planner.plans import Plan
from tightfit.step import forward_backward
from tightfit.training.corrections import Corrections
from tightfit.training.fitting import Fit, LeversInForce
from tightfit.training.recovery.catching import caught
from tightfit.training.recovery.step_state import StepState
from tightfit.training.stepper import Stepper

STEPS = 5  # whose median is looked at
LOOKS = 2  # at most in one training: each takes a few passes over a part of a batch
LOOSENED = 2  # at most in one training, resumed ones included: a plan does not swing between two states
REPEATS = 3  # of each pass, of which the fastest counts
FASTER = 0.95  # of the time in force: what a looser plan may take at most to be worth it


class TimedStep:
    """Times forward and backward of a part of a batch, and leaves everything as it was."""

    def __init__(
        self,
        stepper: Stepper,
        state: StepState,
        levers: LeversInForce,
        plain_peak_bytes: Callable[[Mapping[str, Any]], int],
    ):
        self._stepper, self._state, self.levers = stepper, state, levers
        self._plain_peak_bytes = plain_peak_bytes

    def part_that_fits(self, batch: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The first part of a batch, as large as it can be of a few shares, whose plain step is within the budget."""
        budget = self.levers.fitted.budget_bytes
        assert budget is not None, "only planned steps are timed"
        inseparable = inseparable_samples(batch, self._stepper.loss)
        with self.levers.taken_off():
            for count in (1, 2, 4, 8, inseparable):
                if inseparable % count == 0:
                    part = split_batch(batch, count)[0]
                    if self._plain_peak_bytes(part) <= budget:
                        return part
        return None

    def plain_seconds(self, part: Mapping[str, Any]) -> float | None:
        """Without levers; None where memory ran out."""
        with self.levers.taken_off():
            return self._seconds(part, 1)

    def planned_seconds(self, part: Mapping[str, Any], whole: int, fitted: Fit | None = None) -> float | None:
        """With the levers in force, or those of another fit, in micro-batches of the same size as the whole batch's."""
        fitted = fitted or self.levers.fitted
        count = max(1, fitted.micro_batches * batch_size(part) // whole)
        if fitted is self.levers.fitted:
            return self._seconds(part, count)
        with self.levers.taken_off(), fitted.apply(self._stepper.model):
            return self._seconds(part, count)

    def _seconds(self, part: Mapping[str, Any], count: int) -> float | None:
        times: list[float] = []
        for _ in range(REPEATS):
            self._state.remember()
            failure = caught(lambda: times.append(self._one_pass(part, count)), self._stepper.device)
            for parameter in self._stepper.model.parameters():
                parameter.grad = None
            self._state.put_back()
            if failure is not None:
                return None
        return min(times)

    def _one_pass(self, part: Mapping[str, Any], count: int) -> float:
        stepper = self._stepper
        begun = time.perf_counter()
        loss = forward_backward(
            stepper.model, as_parts(split_batch(part, count), stepper.loss), stepper.loss, stepper.settings.precision
        )
        float(loss)  # until the device is done
        return time.perf_counter() - begun


@dataclass(frozen=True)
class Loosened:
    """The result of a look: a looser fit or None, the peak that plans may have from now on, and a line for the user."""

    line: str = ""
    fitted: Fit | None = None
    gives_back: int | None = None


@dataclass
class Pace:
    """Mutable: the seconds of the last steps under the plan in force, and how often a slow plan was looked at."""

    limit: float | None
    looks: int = 0
    seconds: list[float] = field(default_factory=list)

    def begin_again(self) -> None:
        """Another plan is in force."""
        self.seconds.clear()

    def is_slow(self, seconds: float, plain_seconds: float) -> bool:
        """Note a step; whether the last ones give reason to look: they take longer than the plain step should, by more
        than the limit.
        """
        self.seconds = [*self.seconds, seconds][-STEPS:]
        if self.limit is None or self.looks == LOOKS or len(self.seconds) < STEPS:
            return False
        return statistics.median(self.seconds) > (1 + self.limit) * plain_seconds

    def loosened(
        self, timed: TimedStep, within: Callable[..., Fit], batch: Mapping[str, Any], corrections: Corrections
    ) -> Loosened:
        """Measure the slowdown; beyond the limit, look for a looser plan that is measured faster."""
        assert self.limit is not None
        self.looks += 1
        whole, part = batch_size(batch), timed.part_that_fits(batch)
        if part is None:
            return Loosened()
        plain, planned = timed.plain_seconds(part), timed.planned_seconds(part, whole)
        if plain is None or planned is None:
            return Loosened()
        step = statistics.median(self.seconds)
        extra = (planned - plain) * whole / batch_size(part)
        slowdown = step / max(step - extra, plain) - 1
        self.seconds.clear()
        if slowdown <= self.limit:
            return Loosened()
        line = f"the planned step is measured {slowdown:.0%} slower than the plain one, beyond memory.max_slowdown"
        if corrections.loosened < LOOSENED:
            for candidate, gives_back in _candidates(timed.levers, within, batch, corrections, extra):
                seconds = timed.planned_seconds(part, whole, candidate)
                if seconds is not None and seconds < FASTER * planned:
                    taken = f"a looser plan takes over, {1 - seconds / planned:.0%} faster: {candidate.words()}"
                    return Loosened(f"{line}; {taken}", candidate, gives_back)
        return Loosened(
            f"{line}; no looser plan that fits and computes the same bits is faster: raise memory.budget, or set "
            "memory.max_slowdown to null"
        )


def _candidates(
    levers: LeversInForce, within: Callable[..., Fit], batch: Mapping[str, Any], corrections: Corrections, extra: float
) -> Iterator[tuple[Fit, int | None]]:
    """Looser fits within the budget, each with the bound for later plans."""
    plan = levers.fitted.plan
    assert plan is not None, "only planned steps are loosened"
    budget, bound = plan.budget_bytes, corrections.bound_bytes
    predicted = plan.step_seconds - plan.plain.step_seconds
    ways: list[tuple[int, dict[str, Any], int | None]] = []
    if bound is not None:
        half = (bound + max(budget, bound)) // 2
        ways.append((half, {}, half))
    limit = budget if bound is None else bound
    if plan.lever(Offload) is not None:
        ways.append((limit, {"levers": [kind.name for kind in lever_types() if kind is not Offload]}, bound))
    if predicted > 0 and extra > predicted:
        ways.append((limit, {"overhead": extra / predicted}, bound))
    for bytes_, options, gives_back in ways:
        with suppress(CannotFit, LeverError):
            with levers.taken_off():  # of a model under levers, a plan would take the step for a plain one
                candidate = within(batch, bytes_, **options)
            made = candidate.plan
            assert made is not None
            is_same = bound is not None or _not_exact(made) == _not_exact(plan)
            if is_same and (made.choices, made.levers) != (plan.choices, plan.levers):
                yield candidate, gives_back


def _not_exact(plan: Plan) -> tuple[Any, ...]:
    """The levers of a plan that may change bits."""
    return tuple(lever for lever in plan.levers if lever.exactness is not Exactness.EXACT)
