"""Plans that are in force on models: a new one takes the place of what a training left that failed."""

import logging
import weakref
from typing import Protocol

from torch import nn

logger = logging.getLogger(__name__)


class Owner(Protocol):
    def undo(self) -> None: ...


_OWNERS: weakref.WeakKeyDictionary[Owner, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def take_place(owner: Owner, model: nn.Module) -> None:
    """Undo the plan that another owner has on the model, or on a part of it, and note that it is now this one's."""
    for other, held in list(_OWNERS.items()):
        theirs = held()
        if other is not owner and theirs is not None and _overlap(theirs, model):
            logger.warning("the memory plan that an earlier training left on the model is taken off")
            other.undo()  # which leaves
    _OWNERS[owner] = weakref.ref(model)


def leave(owner: Owner) -> None:
    """The owner has no plan in force any more."""
    _OWNERS.pop(owner, None)


def _overlap(one: nn.Module, other: nn.Module) -> bool:
    return any(part is other for part in one.modules()) or any(part is one for part in other.modules())
