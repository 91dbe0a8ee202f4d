"""Recovers from out of memory in another library's training loop.

That loop calls forward and backward of each batch, and then the optimizer. The current update consists of all batches
since the parameters had no gradients. If memory runs out in one of them, the recovery undoes all of them: it drops the
gradients and restores the state of the modules. Then it makes a tighter plan and runs each batch again, from the random
states with which that batch began. If memory runs out in the optimizer's step, the recovery finishes the step.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tightfit.planner.plans import Plan
from tightfit.tracing.restore import content_changed, repeat_change
from tightfit.training.recovery.catching import Failure, caught, insist
from tightfit.training.recovery.step_state import Content, RandomStates, StepState
from tightfit.training.recovery.tightening import next_plan, run_until_it_fits
from tightfit.training.recovery.update import UpdateGuard, carry_out
from tightfit.units import format_bytes

logger = logging.getLogger(__name__)

Call = Callable[[], Any]


class _Batch(NamedTuple):
    """One batch of the current update: the random states with which it began, and its forward and backward (`call`).

    `changes` lists changes of the modules between the previous batch and this one, for example by a hook that counts.
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
    """Recovers for one model and optimizer. Mutable: the batches of the current update, and the number of failures.

    `plan()` returns the plan in force. `replan(bound_bytes)` replaces it by a plan within the bound and returns that
    plan. It raises `CannotFit` if there is none, and the old plan stays in force. `remove()` removes the recovery.
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
        self._contents: list[Content] = []  # the state of the modules after the last batch
        self._is_single = False  # the optimizer steps one parameter at a time
        self._undo: list[Call] = []
        self.failures = 0
        self.replace(optimizer, "step", self._guarded(optimizer.step))

    def watch(self, owner: Any, name: str) -> None:
        """Recover in `owner.name`, a method that runs forward and backward of one batch, until `remove` is called."""
        self.replace(owner, name, self.watched(getattr(owner, name)))

    def watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, with recovery from out of memory."""

        @functools.wraps(original)
        def recovering(*args: Any, **kwargs: Any) -> Any:
            return self.gradients(functools.partial(original, *args, **kwargs))

        return recovering

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance. `remove` restores it."""
        attributes = vars(owner)
        had, before = name in attributes, attributes.get(name)
        attributes[name] = value
        self._undo.append(lambda: attributes.__setitem__(name, before) if had else attributes.pop(name, None))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def gradients(self, call: Call) -> Any:
        """Run forward and backward of one batch, with tighter plans until it fits.

        Raises `CannotFit` if no tighter plan is left.
        """
        if all(parameter.grad is None for parameter in self._model.parameters()):
            self._end_update()
            insist(self._state.remember, self._device)
        elif not self._batches:
            # Gradients exist that no watched call computed. They cannot be computed again, so the batch cannot be
            # undone, and an out-of-memory error propagates.
            return call()
        self._batches.append(_Batch(self._state.random_states(), self._changed_since(), call))
        results: list[Any] = []
        again = False

        def attempt() -> Failure | None:
            nonlocal again
            if again:
                insist(self._state.remember, self._device)
                return caught(lambda: self._run_again(results), self._device)
            again = True
            return caught(lambda: results.append(call()), self._device)

        def undo() -> None:
            results.clear()
            for parameter in self._model.parameters():
                parameter.grad = None
            self._state.put_back()

        run_until_it_fits(attempt, undo, self._tighten, self._device)
        self._contents = self._state.contents()
        return results[-1]

    def _run_again(self, results: list[Any]) -> None:
        results.extend(batch.run() for batch in self._batches)

    def _changed_since(self) -> list[tuple[Any, Any, Any]]:
        now = [(item, before, item.copy()) for item, before in self._contents]
        return [each for each in now if content_changed(each[0], each[1])]

    def _tighten(self, failure: Failure, tried: Sequence[int]) -> int:
        before = self._plan().peak_bytes
        todo = "train with a smaller batch, or allow more levers"
        found = next_plan(self._replan, failure, [*tried, before], "the memory plan", todo)
        self.failures += 1
        logger.warning(
            "%s; the step is undone and runs again with a tighter plan: %s instead of %s; batch and schedule stay "
            "unchanged", failure, format_bytes(found.peak_bytes), format_bytes(before),
        )  # fmt: skip
        return before

    def _end_update(self) -> None:
        if self._batches:
            self._batches.clear()
            self._contents = []
            insist(self._state.settle, self._device)

    def _guarded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The optimizer's step, which is finished even if memory runs out in it."""

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
