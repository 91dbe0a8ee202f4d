"""Recovery from out of memory in a guest's training, whose loop calls forward and backward, and then the optimizer.

The update under way is all the batches that are accumulated since there were no gradients. If memory runs out in one of
them, all are undone: gradients are dropped, what modules hold is put back, a tighter plan is made, and each of them
runs again from the random states that it began with. If memory runs out in the optimizer's step, the step is finished.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tightfit.planner.plans import Plan
from tightfit.recovery.catching import Failure, caught, insist
from tightfit.recovery.step_state import Content, RandomStates, StepState
from tightfit.recovery.tightening import next_bound, no_tighter_plan, tighter
from tightfit.recovery.update import UpdateGuard, carry_out
from tightfit.tracing.restore import content_changed, repeat_change
from tightfit.units import format_bytes

logger = logging.getLogger(__name__)

Call = Callable[[], Any]


class _Batch(NamedTuple):
    """One batch of the update under way: the random states that it began with, what somebody else than the batches
    changed in the modules since the one before it (a hook that counts), and its forward and backward.
    """

    random_states: RandomStates
    changes: list[tuple[Any, Any, Any]]
    call: Call

    def run(self) -> Any:
        for item, before, after in self.changes:
            repeat_change(item, before, after)
        self.random_states.put_back()
        return self.call()


class GuestRecovery:
    """Recovers for one model and optimizer. Mutable: the calls of the update under way, and what failed before.

    `plan()` is the plan in force. `replan(bound_bytes)` puts one within the bound in its place and returns it, or
    raises `CannotFit` with the old one in force. `remove()` takes the recovery off.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Callable[[], Plan],
        replan: Callable[[int], Plan],
    ):
        self._model, self._optimizer = model, optimizer
        self._plan, self._replan = plan, replan
        self._device = next(model.parameters()).device
        self._state = StepState(model, in_objects=False)
        self._batches: list[_Batch] = []
        self._contents: list[Content] = []  # as the last batch left them
        self._is_single = False  # the optimizer goes parameter by parameter
        self._undo: list[Call] = []
        self.failures = 0
        self.replace(optimizer, "step", self._guarded(optimizer.step))

    def watch(self, owner: Any, name: str) -> None:
        """Recover in `owner.name`, a method that runs forward and backward of one batch; until `remove`."""
        self.replace(owner, name, self.watched(getattr(owner, name)))

    def watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does what `original` does, and recovers."""

        @functools.wraps(original)
        def recovering(*args: Any, **kwargs: Any) -> Any:
            return self.gradients(functools.partial(original, *args, **kwargs))

        return recovering

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance; until `remove`."""
        attributes = vars(owner)
        had, before = name in attributes, attributes.get(name)
        attributes[name] = value
        self._undo.append(lambda: attributes.__setitem__(name, before) if had else attributes.pop(name, None))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def gradients(self, call: Call) -> Any:
        """Run forward and backward of one batch, whatever it takes.

        Raises `CannotFit` where no tighter plan is left. Where there are gradients that no watched call has made, the
        batch cannot be undone, and out of memory goes through.
        """
        if all(parameter.grad is None for parameter in self._model.parameters()):
            self._end_update()
            insist(self._state.remember, self._device)
        elif not self._batches:
            return call()
        self._batches.append(_Batch(self._state.random_states(), self._changed_since(), call))
        results: list[Any] = []
        failure = caught(lambda: results.append(call()), self._device)
        tried: list[int] = []
        while failure is not None:
            results.clear()
            for parameter in self._model.parameters():
                parameter.grad = None
            insist(self._state.put_back, self._device)
            tried.append(self._plan().peak_bytes)
            self._tighten(failure, tried)
            insist(self._state.remember, self._device)
            failure = caught(lambda: self._run_again(results), self._device)
        self._contents = self._state.contents()
        return results[-1]

    def _run_again(self, results: list[Any]) -> None:
        results.extend(batch.run() for batch in self._batches)

    def _changed_since(self) -> list[tuple[Any, Any, Any]]:
        now = [(item, before, item.copy()) for item, before in self._contents]
        return [each for each in now if content_changed(each[0], each[1])]

    def _tighten(self, failure: Failure, tried: list[int]) -> None:
        before = self._plan()
        found = tighter(self._replan, next_bound(failure, before.peak_bytes, len(tried)), before.peak_bytes)
        if found is None:
            raise no_tighter_plan(failure, "the memory plan", tried, "train with a smaller batch, or allow more levers")
        self.failures += 1
        logger.warning(
            "%s; the step is undone and runs again with a tighter plan: %s instead of %s; batch and schedule stay "
            "unchanged", failure, format_bytes(found.peak_bytes), format_bytes(before.peak_bytes),
        )  # fmt: skip

    def _end_update(self) -> None:
        if self._batches:
            self._batches.clear()
            self._contents = []
            insist(self._state.settle, self._device)

    def _guarded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The optimizer's step, finished where memory runs out in it."""

        @functools.wraps(step)
        def guarded(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._end_update()
            own = functools.partial(step, **options)
            whole = own if closure is None else functools.partial(own, lambda: loss)
            guard = UpdateGuard(self._optimizer)
            carry_out(guard, lambda run: run(whole), self._device, single=self._is_single, failed=self._failed_update)
            return loss

        return guarded

    def _failed_update(self, failure: Failure) -> None:
        if not self._is_single:
            self._is_single = True
            self.failures += 1
            logger.warning(
                "%s in the optimizer's step; it goes on where it stopped, one parameter at a time from now on", failure
            )
