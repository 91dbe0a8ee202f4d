"""Plans that are in force on models: a new one takes the place of what an earlier training left."""

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from tightfit.levers.handle import Applied
from tightfit.planner.plans import Plan

logger = logging.getLogger(__name__)

_PUT_ON: weakref.WeakKeyDictionary[Applied, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


class PlanInForce:
    """A plan on a model, which another one can replace. Mutable: `plan`."""

    def __init__(self, plan: Plan, model: nn.Module):
        self.plan, self._model = plan, model
        self._applied = plan.apply(model)

    def replace(self, make: Callable[[], Plan]) -> Plan:
        """Put the plan that `make` returns in its place, made without levers on the model; where it raises, the old one
        stays. Its budget is the user's, within whatever it was made.
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
    """Remember what is in force on a model, as long as somebody holds its handle."""
    _PUT_ON[applied] = weakref.ref(model)


def take_off_earlier(model: nn.Module) -> None:
    """Undo what is noted as in force on the model, or on a part of it, and say so."""
    for applied, held in list(_PUT_ON.items()):
        theirs = held()
        if applied.in_force and theirs is not None and _overlap(theirs, model):
            logger.warning("the memory plan that an earlier training left on the model is taken off")
            applied.undo()


def _overlap(one: nn.Module, other: nn.Module) -> bool:
    return any(part is other for part in one.modules()) or any(part is one for part in other.modules())
