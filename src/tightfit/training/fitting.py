"""How the step of a training will run: planned for a budget, recomputing what was set by hand, or plain."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit, LeverError
from tightfit.levers.captured import recompute
from tightfit.levers.compiled import compile_blocks
from tightfit.levers.micro_batch import inseparable_samples
from tightfit.names import optimizer_in_words
from tightfit.optim import OffloadedAdamW
from tightfit.planner.api import estimate_asked, plan_asked
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.host import host_of
from tightfit.planner.levers import MicroBatches, Recompute, Stream, allowed_levers
from tightfit.planner.plans import Plan
from tightfit.planner.records import HostMemory, StepFigures, WithHost
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.ranks.world import Sharding
from tightfit.runtime.module_paths import globs_of
from tightfit.step import Loss
from tightfit.tracing.record import Category
from tightfit.training.buckets import Bucket, PredictedLength, sized
from tightfit.training.checkpoint.tensors import STAGING_BYTES
from tightfit.training.config.schema import Config, RecomputeConfig
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.random_states import random_bytes
from tightfit.training.state import weights
from tightfit.units import format_bytes, parse_budget, parse_bytes


@dataclass(frozen=True)
class Fit(WithHost):
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
    state_bytes: int = 0  # of a checkpoint's tensors
    copy_bytes: int = 0  # of the copy that is written in the background, where it lies beside the step
    buckets: tuple[Bucket, ...] = ()
    is_sharded: bool = False  # the step of a rank of FSDP2
    host: HostMemory = field(default_factory=HostMemory, compare=False)  # beside what the step puts there

    @property
    def _training_step(self) -> StepFigures:
        return self.planned

    @property
    def host_by_category(self) -> dict[str, int]:
        """Bytes of the host's memory at the highest point there. On a CPU a shorter batch may have it."""
        found = dict(super().host_by_category)
        is_shorter = self.planned.reserved_bytes is None and self.buckets
        rest = self.peak_bytes - self.copy_bytes - self.planned.peak_bytes if is_shorter else 0
        return {**found, **({"a shorter batch": rest} if rest > 0 else {})}

    @property
    def sharding(self) -> Sharding:
        """The plan's choices about FSDP2."""
        return Sharding() if self.plan is None else self.plan.sharding

    @property
    def streams(self) -> bool:
        """True if weights of blocks live on the host."""
        return self.plan is not None and self.plan.lever(Stream) is not None

    def micro_batches_for(self, length: int) -> int:
        """The micro-batches of a batch whose rows have `length` tokens."""
        return next((each.micro_batches for each in self.buckets if length <= each.length), self.micro_batches)

    @property
    def budget_bytes(self) -> int | None:
        """The bytes that the step may take."""
        return None if self.plan is None else self.plan.budget_bytes

    @property
    def whole_budget_bytes(self) -> int | None:
        """The bytes that the step and the copy may take together: the user's budget."""
        return None if self.budget_bytes is None else self.budget_bytes + self.copy_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step as it will run, the copy included: the highest of all batches. A shorter one in
        fewer micro-batches may need more than the longest.
        """
        return max([self.planned.peak_bytes, *(each.peak_bytes for each in self.buckets)]) + self.copy_bytes

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
        """True if the step runs otherwise than the plain one."""
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
    def taken_off(self) -> Iterator[None]:
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


def fit(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss,
    config: Config,
    device: DeviceSpec,
    shorter: Sequence[Mapping[str, Any]] = (),
    shards: int | None = None,
    apart: tuple[str, ...] | None = None,
) -> Fit:
    """Predict the step on this batch, and plan it where the configuration has a budget.

    `device` is the one that it will run on; the model may be elsewhere. `shorter` are batches of fewer tokens a row,
    whose micro-batches are sized by their predicted bytes. Where checkpoints are written in the background on a CPU,
    the plan is made for the budget less their copy. With `shards`, the step is that of so many ranks of FSDP2, and
    shorter batches have the micro-batches of the longest. `apart` are the modules that are sharded beside the blocks
    already, where they are. Raises `CannotFit`, `LeverError` and `TraceError`.
    """
    asked = _asked(model, batch, loss, config, device)
    if shards is not None:
        return _fit_shards(asked.but(world_size=shards, parallel="fsdp2", apart=apart), config, device)
    fitted = _fit_longest(model, batch, loss, config, device)
    if shorter:
        fitted = replace(fitted, buckets=_buckets(asked, fitted, shorter))
    return _with_host(fitted, asked, config)


def _with_host(fitted: Fit, asked: Request, config: Config) -> Fit:
    """The step with what the training takes of the host's memory beside it."""
    stream = None if fitted.plan is None else fitted.plan.lever(Stream)
    host, copies = host_of(asked, stream), fitted.copy_bytes
    if host.loaded:  # a card's state is copied to the host, or goes through a buffer there
        copies = fitted.state_bytes if config.checkpoint.in_background else min(fitted.state_bytes, STAGING_BYTES)
    return replace(fitted, host=replace(host, copies=copies))


def _fit_longest(model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: DeviceSpec) -> Fit:
    memory = config.memory
    budget = memory.host_budget if memory.budget is None and device.kind == "cpu" else memory.budget
    asked = _asked(model, batch, loss, config, device)
    if budget is not None and not _copies(config, device):
        return fit_within(budget, model, batch, loss, config, device)
    plain = estimate_asked(asked.counted()).step_figures
    state = _state_bytes(model, config, plain)
    copy = state if _copies(config, device) else 0
    if budget is not None:
        left = _left_of(budget, copy, plain.peak_bytes, device)
        return fit_within(left, model, batch, loss, config, device, copy=copy)
    count = asked.micro_batches
    by_hand = Fit(plain, plain, count, count, None, memory.recompute, memory.compile_blocks, state, copy)
    if memory.recompute is None and not memory.compile_blocks:
        return by_hand
    with by_hand.apply(model):
        return replace(by_hand, planned=estimate_asked(asked).step_figures)


def _fit_shards(asked: Request, config: Config, device: DeviceSpec) -> Fit:
    model = asked.model
    if config.memory.budget is not None:
        return fit_of(plan_asked(asked, config.memory.budget), model, config, device)
    plain = estimate_asked(asked.counted()).step_figures
    state = _state_bytes(model, config, plain, asked.step.world_size or 1)
    return Fit(plain, plain, asked.micro_batches, asked.micro_batches, state_bytes=state, is_sharded=True)


def _copies(config: Config, device: DeviceSpec) -> bool:
    """True if a copy of the state lies in the memory that the budget bounds while a checkpoint is written."""
    checkpoint = config.checkpoint
    return checkpoint.in_background and checkpoint.every_steps is not None and device.kind == "cpu"


def _state_bytes(model: nn.Module, config: Config, plain: StepFigures, shards: int = 1) -> int:
    """Bytes of a checkpoint's tensors: trained weights, buffers, the optimizer's states, random states.

    Of several shards of the states, the predicted one is the largest.
    """
    states = plain.by_category[str(Category.OPTIMIZER_STATE)] * shards
    optimizer = OptimizerRecipe(config.training)(model.parameters())
    if isinstance(optimizer, OffloadedAdamW):  # its copies of fp32 weights are no states: they are made again
        states -= optimizer.host_weights_bytes
    held = [tensor.nbytes for tensor in weights(model).values()]
    return states + sum(held) + random_bytes()


def _left_of(budget: int | str, copy: int, plain_peak: int, device: DeviceSpec) -> int:
    """The budget's bytes less a copy. Raises `CannotFit` where the copy alone takes it all."""
    whole = parse_budget(budget, device_bytes=device.memory_bytes, plain_peak_bytes=plain_peak)
    if whole <= copy:
        raise CannotFit(
            f"{format_bytes(whole)} cannot fit: checkpoint.in_background copies {format_bytes(copy)} of weights and "
            "optimizer states: set it to false",
            copy,
        )
    return whole - copy


def fit_within(
    budget: int | str,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss,
    config: Config,
    device: DeviceSpec,
    *,
    levers: Collection[str] | None = None,
    copy: int = 0,
) -> Fit:
    """Plan the step on this batch for a budget, whichever the configuration has; with `levers`, with those alone of the
    ones that it allows. The budget is the step's alone, without a copy; that of the host's memory has the `copy` in it.
    Raises as `fit` does.
    """
    asked = _asked(model, batch, loss, config, device)
    if config.memory.host_budget is not None:
        asked = asked.but(host_budget=parse_bytes(config.memory.host_budget) - copy)
    if levers is not None:
        asked = asked.but(levers=sorted(allowed_levers(asked.levers_named) & set(levers)))
    plan = plan_asked(asked, budget)
    return fit_of(plan, model, config, device)


def plain_peak_bytes(model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: DeviceSpec) -> int:
    """The predicted peak of the step on this batch, in one micro-batch and without levers."""
    return estimate_asked(_asked(model, batch, loss, config, device).but(micro_batches=1)).peak_bytes


def fit_of(plan: Plan, model: nn.Module, config: Config, device: DeviceSpec) -> Fit:
    """The step under a plan that was made for this configuration, now or before a resume."""
    training = config.training
    is_sharded = plan.parallel == "fsdp2"
    state = _state_bytes(model, config, plan.plain, plan.world_size if is_sharded else 1)
    count = training.gradient_accumulation_steps
    return Fit(
        plan.plain,
        plan.planned,
        1 if count == "auto" else count,
        plan.micro_batches,
        replace(plan, optimizer=optimizer_in_words(training.optimizer, training.step_in_backward)),
        state_bytes=state,
        copy_bytes=state if _copies(config, device) else 0,
        is_sharded=is_sharded,
    )


def _asked(model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: DeviceSpec) -> Request:
    training, memory = config.training, config.memory
    return Request.of(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=OptimizerRecipe(training),
        precision=training.precision,
        device=device,
        micro_batches=training.gradient_accumulation_steps,
        grad_clip=training.grad_clip,
        step_in_backward=training.step_in_backward,
        levers=memory.levers,
        offload_folder=memory.offload_folder,
        offload_budget=memory.offload_budget,
        steps=training.max_steps,
    )


def _buckets(asked: Request, fitted: Fit, shorter: Sequence[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    """The shorter batches under the levers of the longest, and that one, whose figures are known."""
    batches = {batch["input_ids"].shape[1]: batch for batch in shorter}
    longest = Bucket(asked.batch["input_ids"].shape[1], fitted.micro_batches, fitted.planned.peak_bytes)
    counts, size = [asked.micro_batches], inseparable_samples(asked.batch, asked.loss)
    may_split = asked.fewest_micro_batches or MicroBatches.name in allowed_levers(asked.levers_named)
    if fitted.plan is not None and may_split:
        separation = asked.checked(may_choose=True).separation
        counts += [each.count for each in MicroBatches.apart(separation, asked.micro_batches, size)]

    def run_dry(length: int, count: int) -> PredictedLength:
        found = estimate_asked(asked.but(batch=batches[length], micro_batches=count))
        if fitted.plan is None:
            return PredictedLength(found.peak_bytes, fits=True)
        worst = max(found.peak_bytes, found.worst_peak_bytes or 0)
        room = fitted.plan.room
        reserves_more = room is not None and (found.reserved_bytes or 0) > room.reserved_bytes
        fits = worst + UNSEEN_BYTES <= fitted.plan.budget_bytes and found.fits
        return PredictedLength(worst, fits and not (room is not None and room.is_bounded and reserves_more))

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
