"""Lightning: a memory budget for `Trainer.fit`, and gradient checkpointing for any `LightningModule`.

    Trainer(callbacks=[MemoryBudget("22GiB")])

    class LitModel(FrugalModule, LightningModule): ...
    model.gradient_checkpointing = True

Both work with `lightning` and with `pytorch_lightning`.
"""

import importlib
import logging
import sys
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tightfit.devices.present import lookup
from tightfit.errors import InputError, LeverError
from tightfit.integrations.applied_plans import ReplaceablePlan
from tightfit.integrations.batches import checked_length
from tightfit.integrations.checkpointing import refuse_wrapped, take_over, what_is_taken_over
from tightfit.integrations.extents import Extents
from tightfit.integrations.lightning_step import (
    SkippedBatch,
    keeps_gradients,
    lightning_step,
    muted,
    refuse_unplannable,
    step_traits,
    watch_closures,
)
from tightfit.integrations.model_ranks import ALONE, ranks_of_model
from tightfit.integrations.planning import GuestStep, figures, own_peak, plan_for_all, without_micro_batches
from tightfit.integrations.recovering import GuestRecovery
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.lever import apply_rule
from tightfit.levers.recompute.rule import every_block
from tightfit.levers.samples import stretched
from tightfit.memory.counters import read_counters
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.plans import Plan
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.step_figures import fingerprint
from tightfit.ranks.processes.once import is_first
from tightfit.runtime.nested import Flattened, flatten
from tightfit.step import Batch
from tightfit.units import check_budget

__all__ = ["FrugalModule", "MemoryBudget", "checkpoint_blocks"]

logger = logging.getLogger(__name__)

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the same code under two names


def _base() -> type:
    """The callback class of the package that the user has imported, else of one that is installed.

    A trainer calls the hooks of a callback by name, so that either serves in both.
    """
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(package).Callback
        except ImportError:
            continue
    raise InputError("lightning (or pytorch_lightning) is not installed: pip install 'tightfit[lightning]'")


if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    Callback = _base()


class MemoryBudget(Callback):
    """Keeps a training within a memory budget.

    `budget`, `levers` and `blocks` are those of `tightfit.plan`; the batch is not split, since the loop is Lightning's.
    The plan is made before the first `training_step`, for the batch that is there, with its sequences as long as
    `max_length` tokens where that is given. A batch that has what none before it had (more length, a masked token, an
    ignored label) is checked, and where it would not fit, a plan is made for all that there were; so it is whenever the
    step changes: what is accumulated, trained, or the optimizer's. A budget in shares of the plain peak is then one of
    the new step's. `plan` is the plan in force. It is stored in Lightning's checkpoints, and taken up again on resume
    as long as it is one for this model, budget and device.

    Gradients that the optimizer has used are dropped before the forward that follows, and not after it as Lightning
    does: otherwise they lie in memory beside all activations. Where the module has its own `optimizer_step`,
    `optimizer_zero_grad` or `on_before_zero_grad`, they are left to it, and planned for: as if two batches were
    accumulated at least.

    With `strategy="ddp"`, and with `ModelParallelStrategy` where `configure_model` calls `fully_shard`, each rank plans
    for its own batches, without `recover`.

    Raises `CannotFit` where nothing fits, `InputError` for a batch without tensors that can be seen, and `LeverError`
    for a model that is compiled or sharded in another way, that steps its optimizers itself or has none, or whose
    `training_step` takes a `dataloader_iter`; all of them before anything is trained, and `BudgetError` at once for a
    budget that is none. A batch for which `training_step` returns None is not planned for.

    With `recover=True` a step that runs out of memory is undone and runs again with a tighter plan: the same batches,
    random numbers and schedule. What `training_step` logs is then logged again.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        levers: str | Sequence[str] | None = None,
        blocks: str | None = None,
        max_length: int | None = None,
        recover: bool = False,
    ):
        check_budget(budget)
        self.budget, self.levers, self.blocks = budget, without_micro_batches(levers), blocks
        self.recovers = recover
        self.max_length = checked_length(max_length)
        self.plan: Plan | None = None
        self.own_peak_bytes: int | None = None  # of the gradient checkpointing that is taken over
        self.recovery: GuestRecovery | None = None  # with `recover`, while a training runs
        self._applied: Applied | None = None
        self._in_force: ReplaceablePlan | None = None
        self._batch: tuple[Any, int] = (None, 0)
        self._extents = Extents()
        self._joined = ALONE  # the ranks of the training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.undo()
        self._extents = Extents()
        refuse_wrapped(pl_module, "MemoryBudget")
        # A rank plans when one of its batches needs it, and the others need not know.
        self._joined = ranks_of_model(trainer.strategy.model, "MemoryBudget", shares=False)
        refuse_unplannable(trainer, pl_module)
        if self.recovers:
            self._joined.refuse_recovery("MemoryBudget")
            self.recovery = self._recovery(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if getattr(trainer.fit_loop, "_skip_backward", False):
            # The epoch of statistics after stochastic weight averaging has no backward to plan for; but Lightning steps
            # at its end, with the gradients of the epoch before: they stay, beside the forward's activations.
            return
        if batch_idx % trainer.accumulate_grad_batches == 0 and not keeps_gradients(trainer, pl_module):
            trainer.optimizers[0].zero_grad()
        self._batch = (batch, batch_idx)
        flat = flattened(batch)
        leaves = self._longest(flat)
        traits = step_traits(trainer, pl_module)
        if self._extents.cover(leaves, traits):
            return
        step = self._step(trainer, pl_module, flat, batch_idx)
        with muted(pl_module), suppress(SkippedBatch):
            if not self._holds(step, leaves, traits):
                plan = self._plan_anew(step, leaves, traits)
                logger.info("%s", plan)
                for destination in trainer.loggers:
                    destination.log_metrics(figures(plan, self.own_peak_bytes), step=trainer.global_step)
            self._extents.add(leaves, traits)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        reading = read_counters(pl_module.device)
        pl_module.log("memory_rss_bytes", float(reading.rss_bytes), on_step=True, batch_size=1)
        if reading.allocated_highest_bytes is not None:
            pl_module.log("memory_peak_bytes", float(reading.allocated_highest_bytes), on_step=True, batch_size=1)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.undo()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.plan is None else {"plan": self.plan.to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "plan" in state_dict:
            self.plan = Plan.from_dict(state_dict["plan"])

    def undo(self) -> None:
        """Take the plan off the model: done when a training ends or fails."""
        if self.recovery is not None:
            self.recovery.remove()
            self.recovery = None
        self._take_off()

    def _take_off(self) -> None:
        if self._applied is not None:
            self._applied.undo()
            self._applied = None

    def _step(self, trainer: Any, pl_module: Any, flat: Flattened, batch_idx: int) -> GuestStep:
        step = lightning_step(trainer, pl_module, flat, batch_idx, self._joined)
        return step.but(levers=self.levers, blocks=self.blocks)

    def _holds(self, step: GuestStep, leaves: Batch, traits: Hashable) -> bool:
        """True if the plan there is, of a smaller batch or of a checkpoint, will do; if so it is in force."""
        plan, device = self.plan, lookup(step.device).name
        if plan is None or (plan.fingerprint, plan.device) != (fingerprint(step.model), device):
            return False
        if self._extents.are_of_another(traits):
            return False
        if self._applied is None:
            if plan.budget_bytes != step.budget_bytes(self.budget, plan.plain):
                return False
            self._apply(step.model, plan)
        return step.peak_bytes([leaves], step.accumulated) <= plan.budget_bytes - UNSEEN_BYTES

    def _plan_anew(self, step: GuestStep, leaves: Batch, traits: Hashable) -> Plan:
        """A plan in the place of the one in force, if there is one: within the same bytes, but where the step is
        another one.
        """
        plan = None if self._applied is None or self._extents.are_of_another(traits) else self.plan
        budget = self.budget if plan is None else plan.budget_bytes
        self._take_off()
        taken = take_over(step.model)
        try:
            self.own_peak_bytes = own_peak(step, [leaves], taken)
            made = self._plan_for_all(step, leaves, budget)
        finally:
            if taken is not None:
                taken.remove()
        self._apply(step.model, made)
        self.plan = made
        return made

    def _plan_for_all(self, step: GuestStep, leaves: Batch, budget: int | str) -> Plan:
        """A plan for this batch and those like the ones before, but where the module skips such a one for its values:
        then those are checked when they come again.
        """
        try:
            return plan_for_all(step, self._extents.batches(leaves), budget)
        except SkippedBatch:
            self._extents = Extents()
            return plan_for_all(step, [leaves], budget)

    def _apply(self, model: nn.Module, plan: Plan) -> None:
        taken = take_over(model)
        if taken is not None and is_first():
            logger.warning(what_is_taken_over(self.own_peak_bytes, plan.peak_bytes))
        self._in_force = ReplaceablePlan(plan, model)
        self._applied = Applied([*([] if taken is None else [taken]), self._in_force])

    def _longest(self, flat: Flattened) -> Batch:
        return flat.leaves if self.max_length is None else stretched(flat.leaves, self.max_length)

    def _recovery(self, trainer: Any, pl_module: Any) -> GuestRecovery:
        def in_force() -> Plan:
            assert self._in_force is not None, "a plan is made before the first training step"
            return self._in_force.plan

        def replan(bound_bytes: int) -> Plan:
            assert self._in_force is not None
            batch, index = self._batch
            flat = flattened(batch)
            step = self._step(trainer, pl_module, flat, index)
            with muted(pl_module):
                self.plan = self._in_force.replace(lambda: self._plan_for_all(step, self._longest(flat), bound_bytes))
            return self.plan

        optimizer = trainer.optimizers[0]
        recovery = GuestRecovery(pl_module, getattr(optimizer, "optimizer", optimizer), in_force, replan)
        watch_closures(trainer, recovery)
        return recovery


class FrugalModule:
    """Mixed into a `LightningModule`, or any other module: `gradient_checkpointing = True` recomputes its repeated
    blocks, bit for bit, from then on. Set it when the blocks are there: last in `__init__`, or from outside.

    Raises `LeverError` where there are no repeated blocks.
    """

    @property
    def gradient_checkpointing(self) -> bool:
        return "_checkpointing" in self.__dict__

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        if enabled == self.gradient_checkpointing:
            return
        if enabled:
            self.__dict__["_checkpointing"] = checkpoint_blocks(self)
        else:
            self.__dict__.pop("_checkpointing").undo()


def checkpoint_blocks(model: Any) -> Applied:
    """Recompute every repeated block of a model as a whole. Returns a handle with `undo()`; raises `LeverError`."""
    paths = find_blocks(model)
    if not paths:
        raise LeverError(
            f"gradient_checkpointing: {type(model).__name__} has no repeated blocks: set it once they are built, "
            'or name modules with tightfit.recompute(model, "layers.*")'
        )
    return apply_rule(model, every_block(paths))


def flattened(batch: Any) -> Flattened:
    """The leaves of a batch, and the function that rebuilds it. Raises `InputError` if it contains no tensor."""
    flat = flatten(batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in flat.leaves):
        raise InputError(
            f"MemoryBudget: no tensors were found in a batch of class {type(batch).__name__}: "
            "return a dict, list, tuple or dataclass"
        )
    return flat
