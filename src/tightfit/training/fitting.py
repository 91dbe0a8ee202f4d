"""How the step of a training will run: planned for a budget, recomputing what was set by hand, or plain."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from tightfit.config.schema import Config, RecomputeConfig
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import LeverError
from tightfit.levers.compiled import compile_blocks
from tightfit.levers.recompute import recompute
from tightfit.planner.api import estimate_asked, plan_asked
from tightfit.planner.asked import Asked
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import Recompute, allowed_levers
from tightfit.planner.plans import Plan
from tightfit.planner.records import Footing
from tightfit.runtime.module_paths import globs_of
from tightfit.step import Loss
from tightfit.training.optimizer import OptimizerRecipe


@dataclass(frozen=True)
class Fit:
    """The step without and with its levers in figures, and the levers. Nothing is applied yet."""

    plain: Footing
    planned: Footing
    plain_micro_batches: int
    micro_batches: int
    plan: Plan | None = None
    recompute: RecomputeConfig | None = None
    compiles_blocks: bool = False

    @property
    def budget_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.budget_bytes

    def words(self) -> str:
        """The levers in a few words."""
        plan = self.plan
        if plan is None:
            return "no plan"
        recomputing = sum(choice.action in ("recompute", "operators") for choice in plan.choices)
        others = [str(lever) for lever in plan.levers if not isinstance(lever, Recompute)]
        blocks = [f"{recomputing} of {len(plan.choices)} blocks recompute"] if recomputing else []
        return ", ".join((*others, *blocks)) or "no lever"

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


class LeversInForce:
    """A fit's levers on a model, which another fit's can replace. Mutable: `fitted` is the one in force.

    A context manager: the levers are on the model inside.
    """

    def __init__(self, fitted: Fit, model: nn.Module):
        self.fitted = fitted
        self._model = model
        self._handle: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> Self:
        self._handle = self.fitted.apply(self._model)
        self._handle.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        handle, self._handle = self._handle, nullcontext()
        handle.__exit__(None, None, None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the model has no levers on it: to be planned, or to run plainly."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def replace(self, fitted: Fit) -> None:
        """Put another fit's levers on the model."""
        self.__exit__()
        self.fitted = fitted
        self.__enter__()


def fit(model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: str | DeviceSpec) -> Fit:
    """Predict the step on this batch, and plan it where the configuration has a budget.

    `device` is the one that it will run on, or its name; the model may lie elsewhere. Raises `CannotFit`, `LeverError`
    and `TraceError`.
    """
    memory = config.memory
    if memory.budget is not None:
        return fit_within(memory.budget, model, batch, loss, config, device)
    asked = _asked(model, batch, loss, config, device)
    accumulated = asked.count
    plain = estimate_asked(asked).footing
    by_hand = Fit(plain, plain, accumulated, accumulated, None, memory.recompute, memory.compile_blocks)
    if memory.recompute is None and not memory.compile_blocks:
        return by_hand
    with by_hand.apply(model):
        return replace(by_hand, planned=estimate_asked(asked).footing)


def fit_within(
    budget: int | str,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss,
    config: Config,
    device: str | DeviceSpec,
    *,
    levers: Collection[str] | None = None,
) -> Fit:
    """Plan the step on this batch for a budget, whichever the configuration has; with `levers`, with those alone of the
    ones that it allows. Raises as `fit` does.
    """
    asked = _asked(model, batch, loss, config, device)
    if levers is not None:
        asked = replace(asked, levers=sorted(allowed_levers(asked.levers) & set(levers)))
    plan = plan_asked(asked, budget)
    plan = replace(plan, optimizer=config.training.optimizer)  # by the name that the user knows
    return fit_of(plan, config)


def plain_peak_bytes(
    model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: str | DeviceSpec
) -> int:
    """The predicted peak of the step on this batch, in one micro-batch and without levers."""
    return estimate_asked(replace(_asked(model, batch, loss, config, device), micro_batches=1)).peak_bytes


def fit_of(plan: Plan, config: Config) -> Fit:
    """The step under a plan that was made for the configuration."""
    accumulated = config.training.gradient_accumulation_steps
    return Fit(plan.plain, plan.planned, 1 if accumulated == "auto" else accumulated, plan.micro_batches, plan)


def _asked(model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: str | DeviceSpec) -> Asked:
    training, memory = config.training, config.memory
    return Asked(
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
