"""Makes a plan that fits every batch of another library's training."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.devices.present import lookup
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import BudgetError, CannotFit, TraceError
from tightfit.integrations.batches import all_labels_counted, have_one_shape, repeated
from tightfit.integrations.checkpointing import TakenOver
from tightfit.integrations.model_ranks import ALONE, ModelRanks
from tightfit.levers.micro_batch import batch_size
from tightfit.levers.samples import on_device
from tightfit.planner.api import estimate_asked, plan_asked
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import MicroBatches, allowed_levers
from tightfit.planner.plans import Plan
from tightfit.planner.records import StepFigures
from tightfit.planner.request import Request, device_of_a_rank
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.step import Batch
from tightfit.units import format_bytes, is_share_of, parse_budget

logger = logging.getLogger(__name__)

TIGHTENINGS = 4  # the number of attempts to make a plan that fits another batch too


def without_micro_batches(levers: str | Sequence[str] | None) -> list[str]:
    """The levers for loops of other libraries, which run the batch as it is."""
    return sorted(allowed_levers(levers) - {MicroBatches.name})


@dataclass(frozen=True)
class GuestStep:
    """A training step of another library: as many batches as `request.step.micro_batches` says, then one update.

    The request has no batch yet. Its `loss` computes the library's loss of one batch, in its own precision. Dry runs
    for CUDA add `precision` around it, because their tensors are on the host, where the library's own autocast has no
    effect. `reserved_bytes` of the device are held beside the step, by another library in this process.
    """

    request: Request
    ranks: ModelRanks = ALONE
    reserved_bytes: int = 0

    def beside(self, reserved_bytes: int) -> "GuestStep":
        """The step on a device of which so many bytes are held by another library."""
        return replace(self, reserved_bytes=reserved_bytes)

    def but(self, **changes: Any) -> "GuestStep":
        """The step with other arguments, by the names that `tightfit.plan` has for them."""
        return replace(self, request=self.request.but(**changes))

    @property
    def model(self) -> nn.Module:
        return self.request.step.model

    @property
    def device(self) -> torch.device:
        return self.request.step.device

    @property
    def accumulated(self) -> int:
        """The number of batches whose gradients the library adds up."""
        return self.request.micro_batches

    def asked(self, batch: Batch, micro_batches: int) -> Request:
        """The request with a batch: all those of an update are like this one in the worst case.

        They are on the host: what is planned for would lie on the card beside the training.
        """
        step: Any = self.request.step
        model, optimizer = self.ranks.whole(step.model, step.optimizer)
        return self.request.but(
            model=model,
            batch=self.fullest(on_device(batch, "cpu")),
            optimizer=optimizer,
            precision="fp32" if self.device.type == "cpu" else step.precision,
            micro_batches=micro_batches,
            **self.ranks.arguments,
            **({"device": self._room()} if self.reserved_bytes else {}),
        )

    def whole(self, batch: Batch) -> Batch:
        """The batches of one update as one batch, all like this one."""
        return repeated(batch, self.accumulated)

    def fullest(self, batch: Batch) -> Batch:
        """The batches of one update as one batch, as if exactly one label were ignored, the worst case."""
        return self.whole(all_labels_counted(batch))

    def step_figures(self, batch: Batch, micro_batches: int) -> StepFigures:
        """The figures of the step under the levers now in force, with all batches like this one in the worst case."""
        return estimate_asked(self.asked(batch, micro_batches)).step_figures

    def peak_bytes(self, batches: Sequence[Batch], micro_batches: int) -> int:
        """The highest peak of the step under the levers now in force, with all batches like one of these."""
        with self.ranks.apart():
            return max(self.step_figures(batch, micro_batches).peak_bytes for batch in batches)

    def budget_bytes(self, budget: int | str, plain: StepFigures) -> int:
        """The budget of the step in bytes: what is reserved is taken off one for the device. Raises `BudgetError`."""
        device_bytes = device_of_a_rank(self.device, in_ranks=self.ranks is not ALONE).memory_bytes
        found = parse_budget(budget, device_bytes=device_bytes, plain_peak_bytes=plain.peak_bytes)
        if is_share_of(budget, "x"):
            return found
        if found <= self.reserved_bytes:
            raise BudgetError(
                f"budget {budget!r} leaves nothing for the training beside {format_bytes(self.reserved_bytes)} that "
                "are reserved: raise it, or reserve less"
            )
        return found - self.reserved_bytes

    def _room(self) -> DeviceSpec:
        """The device without what is reserved."""
        device = device_of_a_rank(self.device, in_ranks=self.ranks is not ALONE)
        return replace(device, memory_bytes=device.memory_bytes - self.reserved_bytes)


def plan_for_all(step: GuestStep, batches: Sequence[Batch], budget: int | str) -> Plan:
    """The plan for the batch that needs the most memory, which also fits every other batch. Raises `CannotFit`.

    The plan's figures are those of the batch that needs the most memory under it. Of several ranks, rank 0 makes it.
    """
    if not have_one_shape(batches):
        step = step.but(steps=None)  # each shape would be recorded anew, and the ninth not at all
    make = partial(_plan_for_all, step, batches, budget)
    settings = budget, step.request.levers_named, step.request.blocks
    return step.ranks.plan(step.model, batches, settings, make)


def _plan_for_all(step: GuestStep, batches: Sequence[Batch], budget: int | str) -> Plan:
    with step.ranks.apart():
        return _plan_apart(step, batches, budget)


def _plan_apart(step: GuestStep, batches: Sequence[Batch], asked: int | str) -> Plan:
    if step.ranks is ALONE:
        lookup(step.device, notice=logger.warning, measured=True)  # before the training
    # A shorter batch may need more memory, if its padding makes the model build a mask. So if no plan for the largest
    # batch fits all, plans for the others are tried.
    plain = [(step.step_figures(batch, step.accumulated), batch) for batch in batches]
    plain.sort(key=lambda pair: pair[0].peak_bytes, reverse=True)
    largest, ordered = plain[0][0], [batch for _, batch in plain]
    budget = step.budget_bytes(asked, largest)
    try:
        first = plan_among(step, ordered[0], ordered[1:], budget)
    except CannotFit as error:
        error.args = (f"{error}; the plain step takes {format_bytes(largest.peak_bytes)}, and {asked} was asked for",)
        raise
    for index, batch in enumerate(ordered):
        others = ordered[:index] + ordered[index + 1 :]
        with suppress(CannotFit):
            plan = first if index == 0 else plan_among(step, batch, others, budget)
            plan = tightened(step, plan, batch, others)
            if plan is not None:
                return replace(plan, budget_bytes=budget, plain=largest)
    peak = worst_as_planned(step, first, ordered[1:]).peak_bytes
    raise CannotFit(
        f"{format_bytes(budget)} cannot fit: the plan for the longest batch does not fit another one, which needs "
        f"{format_bytes(peak)} ({peak} bytes) under it",
        peak,
    )


def own_peak(step: GuestStep, batches: Sequence[Batch], taken: TakenOver | None) -> int | None:
    """The peak under the library's own checkpointing; None if it was off, or cannot run dry."""
    if taken is None:
        return None
    try:
        with taken.given_back():
            return step.peak_bytes(batches, step.accumulated)
    except TraceError as error:
        logger.info("the peak under the model's own gradient checkpointing is not known: %s", error)
        return None


def tightened(step: GuestStep, plan: Plan, batch: Batch, others: Sequence[Batch]) -> Plan | None:
    """The plan for one batch, made again within a smaller budget until it fits the others; None if none does.

    Its figures are those of the batch that needs the most memory.
    """
    bound = budget = plan.budget_bytes
    for _ in range(TIGHTENINGS):
        planned = worst_as_planned(step, plan, others)
        if planned.peak_bytes <= budget - UNSEEN_BYTES:
            return replace(plan, planned=planned)
        # Lower the budget for this batch by what the worst batch lacks under the plan.
        bound -= planned.peak_bytes + UNSEEN_BYTES - budget
        try:
            plan = plan_among(step, batch, others, bound)
        except CannotFit:
            return None
    return None


def worst_as_planned(step: GuestStep, plan: Plan, others: Sequence[Batch]) -> StepFigures:
    """The figures of the step under the plan, with the batch that needs the most memory: its own or one of `others`."""
    if not others:
        return plan.planned
    with plan.apply(step.model):
        step_figures = [step.step_figures(batch, plan.micro_batches) for batch in others]
    return max(plan.planned, *step_figures, key=lambda step_figures: step_figures.peak_bytes)


def plan_among(step: GuestStep, batch: Batch, others: Sequence[Batch], budget: int | str) -> Plan:
    """The plan for one batch of several. Its blocks are not held to the operators of that batch: with a mask they run
    others. What the plan's names keep of those is in the figures for that batch.
    """
    plan = plan_one(step, batch, budget)
    return replace(plan, programs=()) if others else plan


def plan_one(step: GuestStep, batch: Batch, budget: int | str) -> Plan:
    """The plan for one batch. Micro-batches split each accumulated batch in the same way."""
    try:
        plan = _fastest(step, batch, budget)
    except CannotFit as error:
        if step.request.blocks is not None or find_blocks(step.model):
            raise
        raise CannotFit(
            f"{error}; {type(step.model).__name__} has no repeated block to recompute: name modules with blocks=",
            error.least_bytes,
            refusal=error.refusal,
        ) from error
    own = step.request.step
    return replace(plan, precision=own.precision, optimizer=type(own.optimizer).__name__)


def _fastest(step: GuestStep, batch: Batch, budget: int | str) -> Plan:
    """The fastest plan that the loop can run. Its number of micro-batches must divide each accumulated batch."""
    levers = allowed_levers(step.request.levers_named)
    counts = [step.accumulated]
    # The loop runs each accumulated batch by itself, so micro-batches must not reach over two of them.
    if MicroBatches.name in levers and step.accumulated > 1:
        size = batch_size(batch)
        counts = [step.accumulated * n for n in range(1, size + 1) if size % n == 0]
        levers -= {MicroBatches.name}
    plans, misfits = [], []
    for count in counts:
        try:
            plans.append(plan_asked(step.asked(batch, count).but(levers=sorted(levers)), budget))
        except CannotFit as error:
            misfits.append(error)
    if not plans:
        raise min(misfits, key=lambda error: error.least_bytes)
    return min(plans, key=lambda plan: plan.step_seconds)


def figures(plan: Plan, own_peak_bytes: int | None = None) -> dict[str, float]:
    """A plan's bytes and seconds for a library's logs, and the peak under checkpointing that it replaces."""
    own = {} if own_peak_bytes is None else {"memory_own_peak_bytes": own_peak_bytes}
    return {
        **own,
        "memory_budget_bytes": plan.budget_bytes,
        "memory_planned_peak_bytes": plan.peak_bytes,
        "memory_plain_peak_bytes": plan.plain_peak_bytes,
        "memory_planned_step_seconds": plan.step_seconds,
        "memory_plain_step_seconds": plan.plain.step_seconds,
    }
