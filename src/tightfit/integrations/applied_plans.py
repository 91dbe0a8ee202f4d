"""Keeps track of plans in force on models, so that a new plan can replace one that an earlier training left."""

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from tightfit.levers.handle import Applied
from tightfit.planner.plans import Plan

logger = logging.getLogger(__name__)

# Weakly: a plan whose handle is gone cannot be undone by it, and its model may be gone too.
_PUT_ON: weakref.WeakKeyDictionary[Applied, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


class ReplaceablePlan:
    """A plan that is applied to a model and can be replaced. Mutable: `plan`."""

    def __init__(self, plan: Plan, model: nn.Module):
        self.plan, self._model = plan, model
        self._applied = plan.apply(model)

    def replace(self, make: Callable[[], Plan]) -> Plan:
        """Replace the plan by the one that `make` returns. If `make` raises, the old plan stays in force.

        `make` sees the model without levers. The new plan gets the user's budget, even if `make` used a tighter bound.
        """
        self._applied.undo()
        try:
            self.plan = replace(make(), budget_bytes=self.plan.budget_bytes)
        finally:
            self._applied = self.plan.apply(self._model)
        return self.plan

    def remove(self) -> None:
        self._applied.undo()


def note(applied: Applied, model: nn.Module) -> None:
    """Record that levers are in force on a model, as long as their handle exists."""
    _PUT_ON[applied] = weakref.ref(model)


def take_off_earlier(model: nn.Module) -> None:
    """Undo recorded levers on the model, or on a part of it, with a warning."""
    for applied, held in list(_PUT_ON.items()):
        theirs = held()
        if applied.in_force and theirs is not None and _overlap(theirs, model):
            logger.warning("the memory plan that an earlier training left on the model is taken off")
            applied.undo()


def _overlap(one: nn.Module, other: nn.Module) -> bool:
    return any(part is other for part in one.modules()) or any(part is one for part in other.modules())
