"""Models in several processes: what DDP or FSDP2 makes of one, and the plan that all ranks share."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError, ModelError
from tightfit.integrations.checkpointing import refuse_wrapped
from tightfit.optim.by_name import optimizer_over
from tightfit.planner.plans import Plan
from tightfit.planner.shared import shapes, shared_plan
from tightfit.planner.step_figures import fingerprint
from tightfit.planner.wrapped import is_distributed
from tightfit.ranks.existing_shards import as_before_sharding, shards_of
from tightfit.ranks.processes.once import said_once
from tightfit.ranks.shards import free_gathered
from tightfit.ranks.world import Shards, World, world_of
from tightfit.ranks.wrapping import settings_of_ddp
from tightfit.runtime.internals import default_group, forget_placements
from tightfit.step import Batch


@dataclass(frozen=True)
class ModelRanks:
    """The processes that train a model: how many, and the settings of DDP, or how FSDP2 has sharded the model.

    `shares`: rank 0 plans for all. Else each rank plans for itself: nothing in the messages depends on its plan.
    """

    size: int = 1
    ddp: tuple[tuple[str, Any], ...] | None = None
    shares: bool = True
    shards: Shards | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The planner's arguments about the processes."""
        if self.shards is not None:
            nodes = (
                {"parallel": "fsdp2"} if self.shards.copies == 1 else {"parallel": "hsdp", "nodes": self.shards.copies}
            )
            return {"world_size": self.size, **nodes, "shards": self.shards}
        return {} if self.ddp is None else {"world_size": self.size, "parallel": "ddp", "ddp": dict(self.ddp)}

    @property
    def world(self) -> World | None:
        """The ranks as the planner knows them; None for one process."""
        given = self.arguments
        if not given:
            return None
        return world_of(self.size, given.get("nodes"), given["parallel"], given.get("ddp"), given.get("shards"))

    def whole(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer for dry runs: of a sharded model a copy as it was before, without memory."""
        if self.shards is None:
            return model, optimizer
        made = as_before_sharding(model)
        copies: dict[torch.Tensor, torch.Tensor] = {}
        copies.update(zip(model.parameters(), made.parameters(), strict=True))
        return made, optimizer_over(optimizer, copies)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context for dry runs: nothing that PyTorch remembers of simulated shards is left in the training."""
        if self.shards is None:
            yield
            return
        forget_placements()
        try:
            yield
        finally:
            forget_placements()
            gc.collect()  # FSDP2's hooks and modules hold each other, and with them what a dry run computed for real

    def plan(self, model: nn.Module, batches: Sequence[Batch], settings: Any, make: Callable[[], Plan]) -> Plan:
        """The plan that `make` returns: on rank 0, for all. Raises `RankError` where ranks differ in what they plan."""
        if self.size == 1 or not self.shares:
            return make()
        facts = {
            "model": fingerprint(model),
            "longest batch": "; ".join(map(shapes, batches)),
            "settings": f"{settings} {self.ddp or self.shards}",
        }
        return shared_plan(facts, make)

    def refuse_recovery(self, who: str) -> None:
        """Raise `LeverError` where a step of several ranks would be repeated: the others wait in its messages."""
        if self.world is not None:
            raise said_once(
                LeverError(f"{who}: recover=True repeats a step, and ranks exchange gradients in it: leave it out")
            )

    def refuse_verification(self, who: str) -> None:
        """Raise `LeverError` where a model is sharded: a plain run and a planned one need it whole."""
        if self.shards is not None:
            raise said_once(
                LeverError(f"{who}: verify=True compares whole models, and FSDP2 has sharded this one: leave it out")
            )


ALONE = ModelRanks()


def ranks_of_model(
    model: Any,
    who: str,
    *,
    no_sync: bool = True,
    shards_no_sync: bool = False,
    shares: bool = True,
    inner: nn.Module | None = None,
) -> ModelRanks:
    """The ranks of a model, which DDP may be around, or which FSDP2 has sharded.

    `no_sync`: its loop exchanges gradients in the last of the accumulated batches only, with DDP around the model, and
    `shards_no_sync` with FSDP2. `shares`: rank 0 plans for all. `inner`: the model that is planned, where a wrapper is
    around it that the caller knows.

    Raises `LeverError` for other wrappers, and for what DDP or FSDP2 does that no rank is simulated with.
    """
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    planned: nn.Module = inner or (model.module if is_ddp else model)
    refuse_wrapped(planned, who)
    if is_ddp and model.process_group is not default_group():
        raise said_once(
            LeverError(f"{who}: DistributedDataParallel has a process group of its own: use the default group")
        )
    try:
        if is_ddp:
            settings = replace(settings_of_ddp(model), no_sync=no_sync)
            return ModelRanks(default_group().size(), tuple(settings.own.items()), shares)
        group = default_group()
        if group is None:
            return ALONE
        free_gathered(planned)
        if not any(map(is_distributed, planned.parameters())):
            return ALONE
        size = group.size()
        return ModelRanks(size, None, shares, shards_of(planned, size, no_sync=shards_no_sync))
    except ModelError as error:
        raise said_once(LeverError(f"{who}: {error}")) from None
