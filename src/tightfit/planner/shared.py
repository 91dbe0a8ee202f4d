"""One plan for the ranks of somebody else's loop: rank 0 makes it, and all ranks have it."""

import json
import logging
from collections.abc import Callable
from typing import Any

from tightfit.errors import InputError, RankError
from tightfit.planner.plans import Plan
from tightfit.planner.request import Request
from tightfit.planner.step_figures import fingerprint
from tightfit.ranks.processes.once import found_once, is_first, is_one_of_several
from tightfit.runtime.internals import default_group
from tightfit.runtime.nested import tensors_in
from tightfit.step import TokenBatch

logger = logging.getLogger(__name__)


def plan_of_one_rank(asked: Request, budget: int | str, make: Callable[[], Plan]) -> Plan:
    """The plan that `make` returns; in a rank of DDP the one that it returns on rank 0.

    A warning says so where a rank plans as if it were alone, since DDP's buckets are not in such a plan.
    """
    if not is_one_of_several():
        return make()
    if asked.step.parallel != "ddp":
        if asked.step.world_size is None and is_first():
            logger.warning(
                "this process is one of %d ranks, and the plan is for one process without DDP's buckets: "
                "parallel='ddp' plans for DistributedDataParallel, once for all ranks",
                default_group().size(),
            )
        return make()
    if asked.ranks != default_group().size():
        raise InputError(
            f"world_size is {asked.step.world_size}, and this process is one of {default_group().size()} ranks: leave "
            "world_size out, or ask in a process of its own"
        )
    settings = {name: repr(value) for name, value in sorted(asked.how.items()) if name in _COMPARED}
    facts = {
        "model": fingerprint(asked.step.model),
        "batch": shapes(asked.step.batch),
        "settings": str({**settings, "budget": budget}),
    }
    return shared_plan(facts, make)


def shared_plan(facts: dict[str, str], make: Callable[[], Plan]) -> Plan:
    """The plan that `make` returns on rank 0, on every rank, if `facts` are the same on all. Raises `RankError`."""
    made: list[Plan] = []

    def written() -> str:
        made.append(make())
        return json.dumps(made[0].to_dict())

    found = json.loads(found_once("a plan", facts, written))
    plan = made[0] if made else Plan.from_dict(found)
    if plan.hash != found["hash"]:
        raise RankError("the plan of rank 0 is another one here: start all ranks with the same version of tightfit")
    return plan


# The arguments that lead to another plan. Losses and optimizers may be objects of each rank.
_COMPARED = (
    "precision", "micro_batches", "grad_clip", "keep_gradients", "step_in_backward", "levers", "blocks", "world_size",
    "ddp", "steps",
)  # fmt: skip


def shapes(batch: Any) -> str:
    """The shapes of a batch, which decide what a step allocates."""
    if isinstance(batch, TokenBatch):
        return str(batch)
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "") for tensor in tensors_in(batch))
