"""Accelerate: a memory budget for a loop written by hand."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from tightfit.integrations.applied_plans import note, take_off_earlier
from tightfit.integrations.checkpointing import take_over, what_is_taken_over
from tightfit.integrations.model_ranks import ranks_of_model
from tightfit.integrations.planning import GuestStep, own_peak, plan_for_all, without_micro_batches
from tightfit.planner.apply import AppliedPlan
from tightfit.planner.request import Request
from tightfit.ranks.processes.once import is_first
from tightfit.runtime.module_paths import without_ddp
from tightfit.step import AUTOCAST_DTYPES, Batch, Loss
from tightfit.units import check_budget

__all__ = ["apply_budget"]

logger = logging.getLogger(__name__)


def apply_budget(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    batch: Batch,
    budget: int | str,
    *,
    loss: Loss | None = None,
    levers: str | Sequence[str] | None = None,
    blocks: str | None = None,
    grad_clip: float | None = None,
) -> AppliedPlan:
    """Plan the step of a loop over a model and an optimizer that `accelerator.prepare` returned, and apply the plan.

    Precision and gradient accumulation are the accelerator's. The plan does not split the batch, because the loop does
    not change. Gradient checkpointing of `transformers` is switched off until `undo()`, with a warning, because the
    plan decides what is recomputed. Where `prepare` has put the model into DDP, or sharded it with FSDP2, every rank
    calls this with a batch of the same shape, and rank 0 plans. A later call replaces the plan that is in force.

    Args:
        accelerator: The `Accelerator` that prepared the model.
        model: The prepared model.
        optimizer: The prepared optimizer.
        batch: The longest batch of the training, with padding if any batch has some.
        budget: As for `tightfit.plan`, like `loss`, `levers`, `blocks` and `grad_clip`.

    Returns:
        A handle with `plan` and `undo()`.

    Raises:
        CannotFit: No plan fits.
        LeverError: The model is compiled, or sharded in another way.
    """
    every_batch: Any = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    defers = accelerator.is_fsdp2 and not every_batch
    ranks = ranks_of_model(model, "apply_budget", no_sync=not every_batch, shards_no_sync=defers)
    check_budget(budget)
    model = without_ddp(model)
    take_off_earlier(model)
    mixed: Any = accelerator.mixed_precision
    request = Request.of(
        model,
        None,
        loss=loss,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        device=accelerator.device,
        precision=mixed if mixed in AUTOCAST_DTYPES else "fp32",
        micro_batches=accelerator.gradient_accumulation_steps,
        grad_clip=grad_clip,
        levers=without_micro_batches(levers),
        blocks=blocks,
    )
    step = GuestStep(request, ranks)
    # The user's checkpointing inside planned blocks would recompute twice, so the plan is made with it switched off.
    taken = take_over(model)
    try:
        own = own_peak(step, [batch], taken)
        plan = plan_for_all(step, [batch], budget)
        applied = plan.apply(model)
    except BaseException:
        if taken is not None:
            taken.remove()
        raise
    if taken is not None and is_first():
        logger.warning(what_is_taken_over(own, plan.peak_bytes))
    if taken is not None:
        applied = AppliedPlan(plan, model, [taken, applied])
    note(applied, model)
    return applied
