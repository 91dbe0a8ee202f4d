"""How the step of a training will run: planned for a budget, recomputing what was set by hand, or plain."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tightfit.config.schema import Config, RecomputeConfig
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import LeverError
from tightfit.levers.compiled import compile_blocks
from tightfit.levers.micro_batch import inseparable_samples
from tightfit.levers.recompute import recompute
from tightfit.planner.api import estimate_asked, plan_asked
from tightfit.planner.asked import Asked
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import MicroBatches, allowed_levers
from tightfit.planner.plans import Plan
from tightfit.planner.records import StepFigures
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.runtime.module_paths import globs_of
from tightfit.step import Loss, model_loss
from tightfit.training.buckets import Bucket, DryRun, sized
from tightfit.training.optimizer import OptimizerRecipe


@dataclass(frozen=True)
class Fit:
    """The step without and with its levers in figures, and the levers. Nothing is applied yet.

    All figures are of the longest batch. `buckets` hold the shorter ones too, the shortest first, where the data comes
    in batches of alike length.
    """

    plain: StepFigures
    planned: StepFigures
    plain_micro_batches: int
    micro_batches: int
    plan: Plan | None = None
    recompute: RecomputeConfig | None = None
    compiles_blocks: bool = False
    buckets: tuple[Bucket, ...] = ()

    def micro_batches_for(self, length: int) -> int:
        """The micro-batches of a batch whose rows have `length` tokens."""
        return next((each.micro_batches for each in self.buckets if length <= each.length), self.micro_batches)

    def peak_bytes_for(self, length: int) -> int:
        """The peak that a step on a batch of such rows has at most: as predicted, and the few bytes that no dry run
        sees.
        """
        found = next((each.peak_bytes for each in self.buckets if length <= each.length), self.planned.peak_bytes)
        return found + UNSEEN_BYTES

    @property
    def predicted_peak_bytes(self) -> int:
        """The highest peak of all batches: a shorter one in fewer micro-batches may need more than the longest."""
        return max([self.planned.peak_bytes, *(each.peak_bytes for each in self.buckets)])

    @property
    def budget_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.budget_bytes

    @property
    def has_levers(self) -> bool:
        """Whether the step runs otherwise than the plain one."""
        return self.plain != self.planned

    def apply(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The levers, in force while the returned context is."""
        if self.plan is not None:
            return self.plan.apply(model)
        if self.compiles_blocks:
            return compile_by_hand(model)
        return nullcontext() if self.recompute is None else recompute_by_hand(model, self.recompute)


def fit(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss,
    config: Config,
    device: str | DeviceSpec,
    shorter: Sequence[Mapping[str, Any]] = (),
) -> Fit:
    """Predict the step on this batch, and plan it where the configuration has a budget.

    `device` is the one that it will run on, or its name; the model may lie elsewhere. `shorter` are batches of fewer
    tokens a row, whose micro-batches are to be sized by their predicted bytes. Raises `CannotFit`, `LeverError` and
    `TraceError`.
    """
    training, memory = config.training, config.memory
    asked = Asked(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=OptimizerRecipe(training),
        precision=training.precision,
        device=device,
        micro_batches=training.gradient_accumulation_steps,
        grad_clip=training.grad_clip,
        levers=memory.levers,
        offload_folder=memory.offload_folder,
        offload_budget=memory.offload_budget,
    )
    fitted = _fit_longest(asked, config)
    return replace(fitted, buckets=_buckets(asked, fitted, shorter)) if shorter else fitted


def _fit_longest(asked: Asked, config: Config) -> Fit:
    training, memory = config.training, config.memory
    if memory.budget is not None:
        plan = plan_asked(asked, memory.budget)
        plan = replace(plan, optimizer=training.optimizer)  # by the name that the user knows
        return Fit(plan.plain, plan.planned, asked.count, plan.micro_batches, plan)
    assert asked.micro_batches != "auto", "without a budget the configuration has a number"
    plain = estimate_asked(asked).step_figures
    by_hand = Fit(plain, plain, asked.count, asked.count, None, memory.recompute, memory.compile_blocks)
    if memory.recompute is None and not memory.compile_blocks:
        return by_hand
    with by_hand.apply(asked.model):
        return replace(by_hand, planned=estimate_asked(asked).step_figures)


def _buckets(asked: Asked, fitted: Fit, shorter: Sequence[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    """The shorter batches under the levers of the longest, and that one, whose figures are known."""
    batches = {batch["input_ids"].shape[1]: batch for batch in shorter}
    longest = Bucket(asked.batch["input_ids"].shape[1], fitted.micro_batches, fitted.planned.peak_bytes)
    counts, size = [asked.count], inseparable_samples(asked.batch, asked.loss or model_loss)
    if fitted.plan is not None and (asked.micro_batches == "auto" or MicroBatches.name in allowed_levers(asked.levers)):
        counts += [each.count for each in MicroBatches.beyond(asked.count, size)]

    def run_dry(length: int, count: int) -> DryRun:
        found = estimate_asked(replace(asked, batch=batches[length], micro_batches=count))
        if fitted.plan is None:
            return DryRun(found.peak_bytes, fits=True)
        worst = max(found.peak_bytes, found.worst_peak_bytes or 0)
        room = fitted.plan.room
        reserves_more = room is not None and (found.reserved_bytes or 0) > room.reserved_bytes
        fits = worst + UNSEEN_BYTES <= fitted.plan.budget_bytes and found.fits
        return DryRun(worst, fits and not (room is not None and room.is_bounded and reserves_more))

    with fitted.apply(asked.model):
        return sized(list(batches), counts, run_dry, longest)


def recompute_by_hand(model: nn.Module, settings: RecomputeConfig) -> AbstractContextManager[Any]:
    """The lever as the section `memory.recompute` sets it, in force at once. Raises `LeverError`."""
    key = "memory.recompute"
    named = settings.blocks
    patterns = (
        _block_patterns(model, key, f"name modules in {key}.blocks, or remove {key}") if named is None else [named]
    )
    with ExitStack() as handles:
        for pattern in patterns:
            handles.enter_context(
                recompute(model, pattern, segments=settings.segments, use_reentrant=settings.use_reentrant)
            )
        return handles.pop_all()


def compile_by_hand(model: nn.Module) -> AbstractContextManager[Any]:
    """The lever as `memory.compile_blocks` sets it, in force at once. Raises `LeverError` and `DeviceError`."""
    with ExitStack() as handles:
        for pattern in _block_patterns(model, "memory.compile_blocks", "set it to false"):
            handles.enter_context(compile_blocks(model, pattern))
        return handles.pop_all()


def _block_patterns(model: nn.Module, key: str, remedy: str) -> list[str]:
    """A glob for each kind of repeated blocks."""
    patterns = globs_of(find_blocks(model))
    if not patterns:
        raise LeverError(f"{key}: the model has no repeated blocks: {remedy}")
    return patterns
