"""Hugging Face: a memory budget for `transformers.Trainer`, as a callback or as a trainer.

    Trainer(..., callbacks=[MemoryBudget("22GiB")])
    FrugalTrainer(..., memory_budget="22GiB", memory_levers="rounding")

Both plan when a training begins, for the first batch and for the longest that can come, with the trainer's own
`compute_loss`, and put the plan on the model until the training ends. The callback leaves the trainer's loop as it is;
`FrugalTrainer` can also split its batches in micro-batches, and makes any other trainer frugal:
`class FrugalOther(FrugalTrainer, Other)`.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tightfit.devices.present import lookup
from tightfit.errors import InputError, LeverError, VerificationFailed
from tightfit.integrations.applied_plans import ReplaceablePlan, note, take_off_earlier
from tightfit.integrations.batches import checked_length
from tightfit.integrations.checkpointing import TakenOver, refuse_wrapped, take_over, what_is_taken_over
from tightfit.integrations.model_ranks import ALONE, ranks_of_model
from tightfit.integrations.planning import GuestStep, figures, own_peak, plan_for_all, without_micro_batches
from tightfit.integrations.recovering import GuestRecovery
from tightfit.integrations.rollouts import refuse_generation_beyond, reservation
from tightfit.integrations.trainer_step import TrainerLoss, nothing_noted, trainer_batches, trainer_step
from tightfit.integrations.weighing import Weighing, measure_weighing
from tightfit.levers.handle import Applied, Removable
from tightfit.levers.micro_batch import as_parts, batch_size, split_batch
from tightfit.levers.samples import first_samples, on_device
from tightfit.memory.counters import read_counters
from tightfit.optim.in_backward import steps_in_backward
from tightfit.planner.levers import MicroBatches, allowed_levers
from tightfit.planner.plans import Plan
from tightfit.ranks.processes.once import is_first
from tightfit.step import Batch, adding_up
from tightfit.units import check_budget, is_share_of
from tightfit.verification import verify

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise InputError("transformers is not installed: pip install 'tightfit[hf]'") from error

__all__ = ["FrugalTrainer", "MemoryBudget"]

logger = logging.getLogger(__name__)


class MemoryBudget(TrainerCallback):
    """Keeps a training within a memory budget.

    `budget`, `levers` and `blocks` are those of `tightfit.plan`; the batch is not split (`FrugalTrainer` does that).
    `max_length` is the longest sequence in tokens that a batch can have; without it the samples of the data set are
    searched for the longest. `verify=True` proves the plan on a part of the first batch before the training begins.
    With `recover=True` a step that runs out of memory is undone and runs again with a tighter plan: the same batches,
    random numbers and schedule. Not with `fp16` inside the optimizer's step, which accelerate's scaler wraps.

    A budget in bytes, or as a share of the device, is for vLLM in this process too, where trl's trainer generates by
    it: its share of the device is taken off, unless it sleeps during steps.

    In DistributedDataParallel (torchrun) rank 0 makes the plan for all ranks, without `recover`; with FSDP2 (of
    accelerate, or of `transformers`) too, and without `verify`.

    When the training begins, raises `CannotFit` where nothing fits, `LeverError` for a model that is compiled or
    sharded in another way, `VerificationFailed`; the model and the trainer are then as they were. `plan` is the plan in
    force, `own_peak_bytes` the predicted peak under the gradient checkpointing that it takes over. A `budget` that is
    none raises `BudgetError` at once.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        levers: str | Sequence[str] | None = None,
        blocks: str | None = None,
        max_length: int | None = None,
        verify: bool = False,
        recover: bool = False,
    ):
        check_budget(budget)
        self.budget, self.levers, self.blocks = budget, levers, blocks
        self.max_length = checked_length(max_length)
        self.verifies = verify
        self.recovers = recover
        self.plan: Plan | None = None
        self.own_peak_bytes: int | None = None  # of the gradient checkpointing that was taken over
        self.weighing: Weighing | None = None  # of micro-batches, once it was measured
        self.trainer: Trainer | None = None
        self._applied = Applied([])
        self._joined = ALONE  # the ranks of the training
        self._plan_within: Callable[[int], Plan] | None = None  # so many bytes, for the batches of this training
        self.recovery: GuestRecovery | None = None  # with `recover`, while a training runs
        allowed_levers(levers)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.undo()
        trainer = self.trainer or running_trainer()
        model = kwargs["model"]
        who = type(self).__name__
        refuse_wrapped(model, who)
        every_batch: Any = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        # Of a model that `transformers` has sharded itself, the trainer is the one that holds messages back.
        shards = trainer.accelerator.is_fsdp2 or getattr(trainer, "is_distributed_loading_by_transformers", False)
        self._joined = ranks_of_model(
            trainer.model_wrapped, who, no_sync=not every_batch, shards_no_sync=shards and not every_batch
        )
        if self.recovers:
            self._joined.refuse_recovery(who)
        if self.verifies:
            self._joined.refuse_verification(who)
        self._alone_and_first_among(trainer.callback_handler.callbacks)
        take_off_earlier(model)
        model.train()
        taken = take_over(model)
        try:
            with nothing_noted(trainer):
                self.plan = self._planned(trainer, model, kwargs["train_dataloader"], taken)
        except BaseException:
            if taken is not None:
                taken.remove()
            raise
        parts: list[Removable] = [] if taken is None else [taken]
        in_force = ReplaceablePlan(self.plan, model)
        self._applied = Applied([*parts, in_force])
        note(self._applied, model)
        if self.recovers:
            self.recovery = self._recovery(trainer, model, in_force)
        if taken is not None and is_first():
            logger.warning(what_is_taken_over(self.own_peak_bytes, self.plan.peak_bytes))
        logger.info("%s", self.plan)
        trainer.log(figures(self.plan, self.own_peak_bytes))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.plan is None or logs is None:
            return
        reading = read_counters(args.device)
        memory = {"memory_rss_bytes": reading.rss_bytes}
        if reading.allocated_highest_bytes is not None:
            memory["memory_peak_bytes"] = reading.allocated_highest_bytes
        logs.update(memory)
        if state.log_history:
            state.log_history[-1].update(memory)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.undo()

    def undo(self) -> None:
        """Take the plan off the model: done when a training ends, or a later one begins on the model."""
        if self.recovery is not None:
            self.recovery.remove()
            self.recovery = None
        self._applied.undo()

    def _recovery(self, trainer: Trainer, model: Any, in_force: ReplaceablePlan) -> GuestRecovery:
        optimizer: Any = trainer.optimizer

        def replan(bound_bytes: int) -> Plan:
            assert self._plan_within is not None
            with nothing_noted(trainer):
                self.plan = in_force.replace(partial(self._plan_within, bound_bytes))
            return self.plan

        recovery = GuestRecovery(model, getattr(optimizer, "optimizer", optimizer), lambda: in_force.plan, replan)
        recovery.watch(trainer, "training_step")
        return recovery

    def _planned(self, trainer: Trainer, model: Any, loader: Any, taken: TakenOver | None) -> Plan:
        batches = trainer_batches(trainer, loader, self.max_length)
        step = trainer_step(trainer, model, batches[-1], self._joined).but(levers=self.levers, blocks=self.blocks)
        self.own_peak_bytes = own_peak(step, batches, taken)
        splits = MicroBatches.name in allowed_levers(self.levers)
        try:
            self.weighing = self._measured(trainer, step, batches[-1]) if splits else None
        except LeverError as error:
            if not isinstance(self.levers, str | None):
                raise LeverError(f"micro_batch: {type(trainer).__name__} cannot split its batches: {error}") from error
            logger.info("micro_batch is left out: %s", error)
            splits = False
        if self.weighing is not None:
            loss: Any = step.request.loss
            step = step.but(loss=TrainerLoss(trainer, loss.items, self.weighing))
        if not splits:
            step = step.but(levers=without_micro_batches(self.levers))
        hosted = [on_device(batch, "cpu") for batch in batches]
        device_bytes = lookup(step.device).memory_bytes
        engine = reservation(trainer, device_bytes)
        beside = engine.while_training
        step = step.beside(beside)
        plan = plan_for_all(step, hosted, self.budget)
        whole = device_bytes if is_share_of(self.budget, "x") else plan.budget_bytes + beside
        refuse_generation_beyond(whole, plan.planned.by_category, engine)
        self._plan_within = lambda bound: plan_for_all(step, hosted, bound + beside)  # a bound is of the step alone
        if self.verifies:
            prove(step, batches[0], plan)
        return plan

    def _measured(self, trainer: Trainer, step: GuestStep, batch: Batch) -> Weighing | None:
        """How micro-batches are weighted, if the trainer can run them.

        Raises `LeverError` where the trainer cannot run them: only a frugal one splits batches, and none whose model
        adds a loss of its router to every batch, of which there would be more.
        """
        config = getattr(trainer.model, "config", None)
        if self._joined.shards is not None:
            raise LeverError("FSDP2 has sharded the model, whose parts were compared on no rank")
        if not isinstance(trainer, FrugalTrainer):
            raise LeverError("only FrugalTrainer does")
        if getattr(config, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False):
            raise LeverError("a router's loss is no sum over micro-batches")
        return None if batch_size(batch) == 1 else measure_weighing(step.model, batch, step.request.loss)

    def _alone_and_first_among(self, callbacks: list[TrainerCallback]) -> None:
        """Before those who report: they find the memory in the logs. Raises `LeverError` for a second budget."""
        if sum(isinstance(callback, MemoryBudget) for callback in callbacks) > 1:
            raise LeverError("MemoryBudget: this training has two memory budgets: leave out all but one")
        if self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)


class FrugalTrainer(Trainer):
    """A `Trainer` with a memory budget, which can also split its batches in micro-batches.

    `memory_budget`, `memory_levers`, `memory_blocks`, `memory_max_length`, `memory_verify` and `memory_recover` are
    what `MemoryBudget` takes. The gradient of a batch in micro-batches is that of the whole: what each counts in
    it is measured on two samples before the training begins.
    """

    def __init__(
        self,
        *args: Any,
        memory_budget: int | str,
        memory_levers: str | Sequence[str] | None = None,
        memory_blocks: str | None = None,
        memory_max_length: int | None = None,
        memory_verify: bool = False,
        memory_recover: bool = False,
        **kwargs: Any,
    ):
        self._memory = MemoryBudget(
            memory_budget,
            levers=memory_levers,
            blocks=memory_blocks,
            max_length=memory_max_length,
            verify=memory_verify,
            recover=memory_recover,
        )
        super().__init__(*args, **kwargs)
        self._memory.trainer = self
        self.add_callback(self._memory)

    @property
    def memory_plan(self) -> Plan | None:
        """The plan in force, or that of the last training; None before the first."""
        return self._memory.plan

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self._memory.undo()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> torch.Tensor:
        batch = dict(inputs)
        count = min(self._micro_batches(), batch_size(batch))
        loss = TrainerLoss(self, num_items_in_batch, self._memory.weighing)
        losses, parts = [], as_parts(split_batch(batch, count), loss)
        for number, part in enumerate(parts, start=1):
            with self._counting(part.weight), adding_up(model, last=number == count):
                losses.append(super().training_step(model, part.batch, num_items_in_batch, **kwargs))
        return torch.stack(losses).sum()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # The Trainer reads the norm for its log even where it clips nothing. With the step in backward no gradient is
        # left to read, and the log has no norm.
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        if grad_norm is None and steps_in_backward(optimizer):
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    @contextmanager
    def _counting(self, share: float) -> Iterator[None]:
        """Inside, the loss of a batch is that share of it, whichever class computes it."""
        if share == 1.0:
            yield
            return
        computed, own = self.compute_loss, self.__dict__.get("compute_loss")

        def shared(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            found: Any = computed(model, inputs, return_outputs=return_outputs, **kwargs)
            return (found[0] * share, *found[1:]) if return_outputs else found * share

        self.__dict__["compute_loss"] = shared
        try:
            yield
        finally:
            del self.__dict__["compute_loss"]
            if own is not None:
                self.__dict__["compute_loss"] = own

    def _micro_batches(self) -> int:
        """How many passes one batch takes."""
        plan = self._memory.plan
        return 1 if plan is None else plan.micro_batches // self.args.gradient_accumulation_steps


def running_trainer() -> Trainer:
    """The trainer that is calling a callback just now: callbacks are told everything but that."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise InputError("MemoryBudget is a callback of transformers' Trainer: pass it as Trainer(callbacks=[...])")


def prove(step: GuestStep, batch: Batch, plan: Plan) -> None:
    """Run a part of the batch plainly and as planned. Raises `VerificationFailed` where they differ.

    The part is the smallest that can be split as the plan says: the plain run has to find room too.
    """
    part = first_samples(step.whole(batch), plan.micro_batches)
    found = verify(step.model, part, plan, loss=step.request.loss)
    if not found.ok:
        raise VerificationFailed(f"the plan is not what the plain training computes: {found}")
    logger.warning("memory plan verified on %d samples: %s", plan.micro_batches, found)
