"""Guests in several processes: what DDP makes of a guest's model, and the plan that all ranks share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tightfit.errors import LeverError, ModelError
from tightfit.integrations.checkpointing import refuse_wrapped
from tightfit.planner.plans import Plan
from tightfit.planner.shared import shapes, shared_plan
from tightfit.planner.step_figures import fingerprint
from tightfit.ranks.world import World, world_of
from tightfit.ranks.wrapping import settings_of_ddp
from tightfit.runtime.internals import default_group
from tightfit.step import Batch


@dataclass(frozen=True)
class Joined:
    """The processes that train a guest's model: how many, and the settings of DDP, which is not there if None.

    `shares`: rank 0 plans for all. Else each rank plans for itself: nothing in DDP's messages depends on its plan.
    """

    size: int = 1
    ddp: tuple[tuple[str, Any], ...] | None = None
    shares: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `tightfit.plan` about the processes."""
        return {} if self.ddp is None else {"world_size": self.size, "parallel": "ddp", "ddp": dict(self.ddp)}

    @property
    def world(self) -> World | None:
        """The ranks as the planner knows them; None for one process."""
        return None if self.ddp is None else world_of(self.size, None, "ddp", dict(self.ddp))

    def plan(self, model: nn.Module, batches: Sequence[Batch], settings: Any, make: Callable[[], Plan]) -> Plan:
        """The plan that `make` returns: on rank 0, for all. Raises `RankError` where ranks differ in what they plan."""
        if self.size == 1 or not self.shares:
            return make()
        facts = {
            "model": fingerprint(model),
            "longest batch": "; ".join(map(shapes, batches)),
            "settings": f"{settings} {self.ddp}",
        }
        return shared_plan(facts, make)

    def refuse_recovery(self, who: str) -> None:
        """Raise `LeverError` where a step of several ranks would be repeated: the others wait in its messages."""
        if self.ddp is not None:
            raise LeverError(f"{who}: recover=True repeats a step, and ranks exchange gradients in it: leave it out")


ALONE = Joined()


def joined_by(model: Any, who: str, *, no_sync: bool = True, shares: bool = True) -> Joined:
    """The ranks of a guest's model, which DDP may be around. `no_sync`: its loop adds up gradients in the last of the
    accumulated batches only. `shares`: rank 0 plans for all.

    Raises `LeverError` for other wrappers, and for what DDP does that no rank is played with.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        refuse_wrapped(model, who)
        return ALONE
    refuse_wrapped(model.module, who)
    if model.process_group is not default_group():
        raise LeverError(f"{who}: DistributedDataParallel has a process group of its own: use the default group")
    try:
        settings = replace(settings_of_ddp(model), no_sync=no_sync)
    except ModelError as error:
        raise LeverError(f"{who}: {error}") from error
    return Joined(default_group().size(), tuple(settings.own.items()), shares)
