"""A step that is run dry until it is the step that every later one repeats, with the optimizer's states."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.errors import TraceError
from tightfit.memory.allocator import memory_of
from tightfit.optim.by_name import host_states, named_states
from tightfit.optim.in_backward import gradient_memory
from tightfit.runtime.simulation import host_memory
from tightfit.step import Loss, Part, StepSettings, accumulation, adding_up, forward_backward, update
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.record import Category, Phase
from tightfit.tracing.restore import Contents
from tightfit.tracing.shapes import TensorShape


class Phases:
    """An observer of the step that sets the dry run's phase."""

    def __init__(self, dry: DryRun):
        self.dry = dry

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.dry.phase = Phase(name)
        yield


@dataclass
class Scaler:
    """The part of `torch.amp.GradScaler` in forward and backward."""

    number: torch.Tensor

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.number


@dataclass
class DryStep:
    """A step that is run dry until every later one would find the same: the optimizer's states, a model's caches.

    What the methods that run it return are the operators at which its micro-batches begin, and the end of the last one.
    """

    dry: DryRun
    model: nn.Module
    parts: Sequence[Part]
    loss: Loss
    settings: StepSettings
    on_cuda: bool
    optimizer: torch.optim.Optimizer  # without states; later it holds them until the trace is made
    built: Callable[[], torch.optim.Optimizer]  # gives another one like it
    updates_on_host: bool = False  # weights, gradients and states are in the host's memory

    def until_steady(self, steps: int = 2) -> list[int]:
        """Run whole steps, and record the last one. The first one has no states before its optimizer phase."""
        for _ in range(steps - 1):
            self.run()
        return self.recorded()

    def with_states_first(self) -> list[int]:
        """Have the optimizer make its states from gradients without memory, and record the first whole step.

        That leaves out one forward and one backward, half of the time. If the step changed the model or kept a tensor,
        a later step may differ from it, and is run as well.
        """
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        for _ in range(2):  # the second time for those parameters only that the first backward has reached
            for name in names:
                give_gradient(self.dry, self.model.get_parameter(name), name)
            self.update()
            imported = len(sys.modules)
            boundaries = self.recorded()
            if names == list(self.dry.with_gradient):
                # An import leaves cycles that hold tensors for a while, in no other step than in that of the import.
                is_first = len(sys.modules) != imported or self.dry.leaves_something()
                return self.recorded() if is_first else boundaries
            names = list(self.dry.with_gradient)
            self.drop_states()  # some are of parameters that get no gradient
            self.optimizer = self.built()
        return self.until_steady()

    def recorded(self) -> list[int]:
        """Run a step and record it."""
        self.dry.begin_again()
        self.dry.gradients_before = tuple(name for name, p in self.model.named_parameters() if p.grad is not None)
        return self.run()

    def run(self) -> list[int]:
        boundaries = run_parts(self.dry, self.model, self.parts, self.loss, self.settings)
        self.update()
        return boundaries

    def drop_states(self) -> None:
        for _, _, state in named_states(self.optimizer):
            self.dry.drop_original(state)

    def update(self) -> None:
        overflow = None
        if self.dry.loss_scale is not None:  # whether a gradient overflowed, which `GradScaler` holds in its step
            overflow = TensorShape((1,), (1,), torch.float32).unbacked()
            self.dry.ledger.track(overflow, known=False, operator=None)
        try:
            with host_memory() if self.updates_on_host else nullcontext():
                update(self.model, self.optimizer, self.settings, observer=Phases(self.dry))
        except RuntimeError as error:
            if "dense gradients" not in str(error):
                raise
            raise TraceError(
                f"{type(self.optimizer).__name__} takes sparse gradients alone, and a dry run makes dense ones: "
                "predict the step with SGD or Adagrad, which take both"
            ) from error
        del overflow
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        label_states(self.dry, names, self.optimizer, on_cuda=self.on_cuda)


def needs_no_gradients(model: nn.Module, settings: StepSettings) -> bool:
    """True if an optimizer makes the same states from gradients that no backward has made."""
    if settings.keep_gradients:
        return False  # those of a parameter without a gradient would stay
    # Hooks step in backward, or move gradients to the host. A trained tensor of a class of its own may have gradients
    # of that class.
    trained = [p for p in model.parameters() if p.requires_grad]
    return not any(p._post_accumulate_grad_hooks or type(p) is not nn.Parameter for p in trained)


def give_gradient(dry: DryRun, parameter: torch.Tensor, name: str) -> None:
    """Give a parameter a gradient without memory, unless it has one. The optimizer may free it."""
    if parameter.grad is None:
        parameter.grad = TensorShape.of(parameter).unbacked()
        dry.ledger.track(parameter.grad, known=False, operator=None)
        dry.ledger.label(parameter.grad, Category.GRADIENT, name)


def label_states(
    dry: DryRun, names: Mapping[torch.Tensor, str], optimizer: torch.optim.Optimizer, *, on_cuda: bool
) -> None:
    """Name the optimizer's states in the record, by the names of their parameters."""
    for parameter, key, state in named_states(optimizer):
        dry.ledger.label(state, Category.OPTIMIZER_STATE, f"{names.get(parameter, '')} {key}".strip())
    # On CUDA, counts of steps stay in host memory. The dry run's tensors are all on the CPU and cannot show that.
    for state in host_states(optimizer) if on_cuda else ():
        dry.ledger.on_host(state)


def run_parts(dry: DryRun, model: nn.Module, parts: Sequence[Part], loss: Loss, settings: StepSettings) -> list[int]:
    """Run forward and backward of each micro-batch. Returns the operators at which they begin, and the end."""
    boundaries = [len(dry.operators)]
    scaler: Any = None if dry.loss_scale is None else Scaler(dry.loss_scale)
    before = None  # the loss of a micro-batch, which a training adds up, so it is there while the next one runs
    for number, part in enumerate(parts, start=1):
        more_follow = number < len(parts)
        held = Contents((part.batch,))  # a loss may take its labels out of the batch, and it runs again
        try:
            with accumulation() if more_follow else nullcontext(), adding_up(model, last=not more_follow):
                precision, observer = settings.precision, Phases(dry)
                before = forward_backward(model, [part], loss, precision, scaler=scaler, observer=observer)
        finally:
            held.restore()
        boundaries.append(len(dry.operators))
        dry.with_gradient = tuple(name for name, p in model.named_parameters() if p.grad is not None)
        # Labelled here: the optimizer sets gradients to None, and an offloading one has moved them to the host.
        for name in dry.with_gradient:
            gradient = gradient_memory(model.get_parameter(name))
            for held in () if gradient is None else memory_of(gradient):
                dry.ledger.label(held, Category.GRADIENT, name)
    del before
    return boundaries
