"""Runs a whole training step dry and returns its record."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tightfit.levers.recompute.region import forwards_on
from tightfit.memory.allocator import memory_of
from tightfit.optim import OffloadedAdamW
from tightfit.optim.by_name import OptimizerFactory, build_optimizer, moves_gradients, named_states
from tightfit.optim.in_backward import only, step_in_backward, steps_in_backward
from tightfit.optim.link import file_of
from tightfit.runtime.simulation import simulation
from tightfit.step import Loss, Part, StepSettings, adding_up, let_go, modules_beside, stepped, update
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.replay import as_allocated
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.questions import retried
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.tracing.recording import NO_EXECUTOR_COST, ExecutorCost, OperatorCost, Recording, no_cost
from tightfit.tracing.repeated import DryStep, Phases, give_gradient, label_states, needs_no_gradients, run_parts
from tightfit.tracing.rules import Routing
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.surroundings import Rank, announce, dry_run_of

STEPPED = "step in backward: "  # of a note in a trace: the parameter whose gradient is used up there


Optimizer = str | OptimizerFactory | torch.optim.Optimizer


@retried
def trace_step(
    model: nn.Module,
    parts: Sequence[Part],
    loss: Loss,
    *,
    optimizer: Optimizer = "adamw",
    settings: StepSettings | None = None,
    cost: OperatorCost = no_cost,
    executor: ExecutorCost = NO_EXECUTOR_COST,
    role: CudaRole | None = None,
    routing: Routing = Routing.BALANCED,
    rank: Rank | None = None,
) -> StepTrace:
    """Run a training step dry as every one but the first runs it, with the optimizer's states, and return its trace.

    `parts` are the micro-batches, the largest last. `routing` is the assumption about a router's choices. With a
    `role`, CPU tensors simulate a CUDA device. The model, its gradients, the batch, the optimizer and the random
    generators do not change, except with a `rank`: the model is then its own, and is changed. Raises `TraceError` for
    an operator that cannot run dry.
    """
    settings = settings or StepSettings()
    asked: dict[str, Any] = {
        "optimizer": optimizer, "settings": settings, "cost": cost, "executor": executor, "role": role,
        "routing": routing, "rank": rank,
    }  # fmt: skip
    if role is None or settings.precision == "fp32" or not any(f.begins_otherwise for f in forwards_on(model)):
        trace = _traced(model, parts, loss, **asked)
        return trace if role is None else as_allocated(trace)
    try:
        with first_step():
            begun = _traced(model, parts, loss, **asked)
        return as_allocated(replace(_traced(model, parts, loss, **asked), first_step=begun))
    finally:
        simulation.sharing_casts = frozenset()


def _traced(
    model: nn.Module,
    parts: Sequence[Part],
    loss: Loss,
    *,
    optimizer: Optimizer,
    settings: StepSettings,
    cost: OperatorCost,
    executor: ExecutorCost,
    role: CudaRole | None,
    routing: Routing,
    rank: Rank | None,
) -> StepTrace:
    """A whole step's trace, with the sums of its storages for levels."""
    held = {name: p.grad for name, p in model.named_parameters() if type(p.grad) is torch.Tensor}
    with dry_run_of(model, parts, cost, executor, role, routing, modules_beside(loss), rank, settings, loss) as dry:
        if rank is not None:
            model = _joined(dry, model, rank)
        twin = _built(optimizer, model, settings)
        # Gradients that the optimizer does not own are never cleared, so they are there in every step.
        stand_in(dry, model, [name for name in held if not _steps(twin, model.get_parameter(name))])
        is_last_alone = steps_in_backward(twin) or (rank is not None and rank.reduces_once)
        traced, repeated = representatives(parts, is_last_alone)
        step = DryStep(
            dry, model, traced, loss, settings, on_cuda=role is not None,
            optimizer=twin, built=lambda: _built(optimizer, model, settings),
            updates_on_host=rank is not None and rank.is_on_host,
        )  # fmt: skip
        del twin
        begun = None
        if simulation.is_first_step:
            boundaries = step.recorded()
        elif rank is None and needs_no_gradients(model, settings):
            boundaries = step.with_states_first()
        elif rank is not None and rank.steps > 2 and role is not None:
            # What the second step allocates anew (DDP's buckets) goes where the first one has left room.
            begun = record(dry, step.recorded(), repeated=repeated, repeats=len(parts) - len(traced) + 1)
            boundaries = step.until_steady(rank.steps - 1)
        else:
            boundaries = step.until_steady(2 if rank is None else rank.steps)
        found = record(dry, boundaries, repeated=repeated, repeats=len(parts) - len(traced) + 1)
        return replace(found, first_step=begun)


@contextmanager
def first_step() -> Iterator[None]:
    """A context in which a step that runs dry is the first one on its device."""
    simulation.is_first_step = True
    try:
        yield
    finally:
        simulation.is_first_step = False


def _joined(dry: DryRun, model: nn.Module, rank: Rank) -> nn.Module:
    """The model as a rank holds it, which wraps it first."""
    dry.ledger.track_all(model.parameters())
    wrapped = rank.wrapped(model)
    if rank.is_on_host and simulation.of_cuda:
        for shard in (memory for parameter in wrapped.parameters() for memory in memory_of(parameter)):
            dry.ledger.on_host(shard)
    announce(dry.ledger, wrapped, [], [])
    return wrapped


def _built(optimizer: Optimizer, model: nn.Module, settings: StepSettings) -> torch.optim.Optimizer:
    """The optimizer of a dry run, which steps in backward if the settings say so."""
    twin = build_optimizer(optimizer, model.parameters())
    return step_in_backward(twin, model).optimizer if settings.step_in_backward else twin


def _steps(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """True if the optimizer owns a parameter, and so clears its gradient after each step."""
    return any(known is parameter for group in optimizer.param_groups for known in group["params"])


def stand_in(dry: DryRun, model: nn.Module, names: Iterable[str]) -> None:
    """Give parameters a gradient without memory that exists before the step begins."""
    for name in names:
        parameter = model.get_parameter(name)
        parameter.grad = TensorShape.of(parameter).unbacked()
        dry.ledger.announce(parameter.grad, Category.GRADIENT, known=False, name=name)


def representatives(parts: Sequence[Part], is_last_alone: bool) -> tuple[list[Part], int]:
    """The micro-batches to trace, and the index of the one that represents several.

    The first micro-batch finds no gradients. Every later one finds those of the earlier ones, so one of them represents
    all.
    """
    if is_last_alone and len(parts) > 2:
        # An optimizer that steps in backward does so in the last micro-batch only, which frees gradients that the
        # earlier ones keep. DDP adds up gradients in the last one only. So it represents none of them.
        return [parts[-2], parts[-1], parts[-1]], 1
    traced = list(parts[-2:])
    return traced, len(traced) - 1


@retried
def trace_part(
    model: nn.Module,
    parts: Sequence[Part],
    loss: Loss,
    *,
    settings: StepSettings,
    state_bytes: int,
    with_gradient: Sequence[str],
    gradients_before: Sequence[str] = (),
    optimizer: Optimizer | None = None,
    cost: OperatorCost = no_cost,
    executor: ExecutorCost = NO_EXECUTOR_COST,
    role: CudaRole | None = None,
    in_backward: bool = False,
    routing: Routing = Routing.BALANCED,
    rank: Rank | None = None,
) -> StepTrace:
    """Trace forward and backward of the last micro-batch only, which is faster than a whole step.

    The arguments give the rest of the step's memory. `state_bytes` are the optimizer's states. `with_gradient` names
    the parameters that get a gradient; with several micro-batches it exists from the start. `gradients_before` names
    the parameters that have a gradient before the step. With `in_backward` each gradient is freed when it is ready, at
    an operator `STEPPED` that does nothing. `optimizer` is needed if it steps in backward, or moves gradients there.
    `routing` is as for `trace_step`. With a `rank` the model is its own, and is changed.
    """
    with dry_run_of(model, parts, cost, executor, role, routing, modules_beside(loss), rank, settings, loss) as dry:
        if rank is not None:
            model = _joined(dry, model, rank)
            dry.ledger.reserve(state_bytes, Category.OPTIMIZER_STATE)
            if len(parts) > 1:  # an earlier one makes the gradients that the last one finds, as the engine makes them
                with adding_up(model, last=False):
                    run_parts(dry, model, [parts[-1]], loss, settings)
                dry.begin_again()
            return record(dry, run_parts(dry, model, [parts[-1]], loss, settings), repeats=len(parts))
        stepping = None  # held until the end: it holds its states, and without it no gradient is used up
        # Of several micro-batches only the last one steps. The others have the higher levels: they free no gradient.
        in_parts = len(parts) > 1
        is_moving = role is not None or any(file_of(parameter) is not None for parameter in model.parameters())
        moves = is_moving and moves_gradients(optimizer)
        if optimizer is not None and (moves or (settings.step_in_backward and not in_parts)):
            stepping = _built(optimizer, model, settings)
            _give_states(dry, model, stepping, with_gradient, settings)
        else:
            dry.ledger.reserve(state_bytes, Category.OPTIMIZER_STATE)
        stand_in(dry, model, dict.fromkeys([*gradients_before, *(with_gradient if in_parts else ())]))
        if moves and in_parts and isinstance(stepping, OffloadedAdamW):
            for name in with_gradient:
                stepping.take(model.get_parameter(name))
            dry.begin_again()
        before = TensorShape((), (), torch.float32).unbacked() if in_parts else None  # the loss of earlier ones
        if before is not None:
            dry.ledger.track(before, known=False, operator=None)
        with step_in_backward(_Spending(model, dry), model) if in_backward else nullcontext():
            boundaries = run_parts(dry, model, [parts[-1]], loss, settings)
        del stepping, before
        return record(dry, boundaries, repeats=len(parts))


class _Spending(torch.optim.Optimizer):
    """An optimizer that changes nothing. It notes when a gradient would be used up, and the parameter's name."""

    def __init__(self, model: nn.Module, dry: DryRun):
        super().__init__([p for p in model.parameters() if p.requires_grad], {})
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._dry = dry

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._dry.begin([])
                    self._dry.note(f"{STEPPED}{self._names[parameter]}", 0.0)


def trace_update(
    model: nn.Module,
    optimizer: str | OptimizerFactory | torch.optim.Optimizer,
    *,
    settings: StepSettings,
    with_gradient: Sequence[str],
    cost: OperatorCost = no_cost,
    role: CudaRole | None = None,
    one_by_one: bool = False,
) -> StepTrace:
    """Trace the optimizer's phase only, with its states and a gradient for each parameter in `with_gradient`.

    With `one_by_one`, the parameters are updated one after the other, each at an operator `STEPPED`, as inside
    backward. Raises the errors of `build_optimizer`.
    """
    with dry_run_of(model, [], cost, NO_EXECUTOR_COST, role, settings=settings) as dry:
        twin = build_optimizer(optimizer, model.parameters())
        observer = Phases(dry)
        for recorded in (False, True):
            if recorded:
                dry.begin_again()
            for names in [[name] for name in with_gradient] if one_by_one else [with_gradient]:
                if one_by_one:
                    dry.begin([])
                    dry.note(f"{STEPPED}{names[0]}", 0.0)
                for name in names:
                    give_gradient(dry, model.get_parameter(name), name)
                with only(twin, model.get_parameter(names[0])) if one_by_one else nullcontext():
                    update(model, twin, settings, observer=observer)
            label_states(dry, {p: name for name, p in model.named_parameters()}, twin, on_cuda=role is not None)
        return record(dry, [0, len(dry.operators)], repeats=1)


def _give_states(
    dry: DryRun, model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str], settings: StepSettings
) -> None:
    """Have an optimizer make its states, as after a first step, and begin to record."""
    for name in names:
        give_gradient(dry, model.get_parameter(name), name)
    stepped(optimizer)
    let_go(optimizer, settings)
    dry.begin_again()
    for _, _, state in named_states(optimizer):
        dry.ledger.label(state, Category.OPTIMIZER_STATE, "")


@retried
def trace_inference(
    model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], Any], *, role: CudaRole | None = None
) -> StepTrace:
    """Run an evaluation, `call(model, batch)` without gradients, dry. All of it counts as the phase forward.

    Does not change the model, the batch or the random generators.
    """
    with dry_run_of(model, [Part(batch, 1.0)], no_cost, NO_EXECUTOR_COST, role, loss=call) as dry:
        with torch.no_grad():
            call(model, batch)
        trace = record(dry, [0, len(dry.operators)], repeats=1)
    return trace if role is None else as_allocated(trace)


def record(dry: Recording, boundaries: list[int], *, repeats: int, repeated: int = 0) -> StepTrace:
    """The trace of a run. The micro-batch with the index `repeated` represents `repeats` micro-batches."""
    dry.settle_sum()
    backward = next((i for i, o in enumerate(dry.operators) if o.phase is Phase.BACKWARD), len(dry.operators))
    return StepTrace(
        operators=tuple(dry.operators),
        storages=dry.ledger.storage_records(backward),
        values=dry.ledger.value_records(),
        levels=tuple(dry.levels),
        starts=tuple(dry.starts),
        assumptions=tuple(dry.questions.asked.values()),
        loop_repeats=repeats,
        repeated=(boundaries[repeated], boundaries[repeated + 1]),
        with_gradient=dry.with_gradient,
        calls=tuple(dry.modules.calls),
        gradients_before=dry.gradients_before,
        reads_draws=isinstance(dry, DryRun) and dry.has_read_draws(),
    )
