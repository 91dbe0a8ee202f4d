"""How the step of a training will run: planned for a budget, recomputing what was set by hand, or plain."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tightfit.config.schema import Config, RecomputeConfig
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import LeverError
from tightfit.levers.compiled import compile_blocks
from tightfit.levers.recompute import recompute
from tightfit.planner.api import estimate_asked, plan_asked
from tightfit.planner.asked import Asked
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.plans import Plan
from tightfit.planner.records import StepFigures
from tightfit.runtime.module_paths import globs_of
from tightfit.step import Loss
from tightfit.training.optimizer import OptimizerRecipe


@dataclass(frozen=True)
class Fit:
    """The step without and with its levers in figures, and the levers. Nothing is applied yet."""

    plain: StepFigures
    planned: StepFigures
    plain_micro_batches: int
    micro_batches: int
    plan: Plan | None = None
    recompute: RecomputeConfig | None = None
    compiles_blocks: bool = False

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


def fit(model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: str | DeviceSpec) -> Fit:
    """Predict the step on this batch, and plan it where the configuration has a budget.

    `device` is the one that it will run on, or its name; the model may lie elsewhere. Raises `CannotFit`, `LeverError`
    and `TraceError`.
    """
    training, memory = config.training, config.memory
    accumulated = training.gradient_accumulation_steps
    asked = Asked(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=OptimizerRecipe(training),
        precision=training.precision,
        device=device,
        micro_batches=accumulated,
        grad_clip=training.grad_clip,
        levers=memory.levers,
        offload_folder=memory.offload_folder,
        offload_budget=memory.offload_budget,
    )
    if memory.budget is not None:
        plan = plan_asked(asked, memory.budget)
        plan = replace(plan, optimizer=training.optimizer)  # by the name that the user knows
        return Fit(plan.plain, plan.planned, asked.count, plan.micro_batches, plan)
    assert accumulated != "auto", "without a budget the configuration has a number"
    plain = estimate_asked(asked).step_figures
    by_hand = Fit(plain, plain, accumulated, accumulated, None, memory.recompute, memory.compile_blocks)
    if memory.recompute is None and not memory.compile_blocks:
        return by_hand
    with by_hand.apply(model):
        return replace(by_hand, planned=estimate_asked(asked).step_figures)


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
