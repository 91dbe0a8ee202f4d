"""The optimizer's step inside backward: each weight is updated when its gradient is ready, and the gradient is freed.

All gradients never exist at the same time. Clipping by the common norm and gradient scalers need all of them, so they
are refused (other libraries skip the clipping silently: torchtitan#990, pytorch#124523).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import InputError, LeverError
from tightfit.optim.host_gradient import HostGradient
from tightfit.runtime.internals import no_torch_function, tensor_without_memory
from tightfit.runtime.simulation import simulation
from tightfit.step import accumulation, is_accumulating

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_SECOND_BACKWARD = (
    "step in backward: a second backward before optimizer.step(): this gradient is used up already; to accumulate, run "
    "every backward but the last under `with handle.accumulate():`"
)
_USED_UP = (
    "step in backward: this gradient is used up already, so that {what} cannot read it: gradient clipping and gradient "
    "scalers need all gradients at once; leave them out, or undo() the lever"
)


class SpentGradient(Tensor):
    """The `.grad` of a parameter whose gradient was used up by its step. It has no memory; reading it raises."""

    __torch_function__: Any = no_torch_function

    @staticmethod
    def __new__(cls, parameter: Tensor) -> "SpentGradient":
        return tensor_without_memory(cls, parameter)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SpentGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return SpentGradient(args[0])
        if func is torch.ops.aten.add_.Tensor:
            raise LeverError(_SECOND_BACKWARD)
        raise LeverError(_USED_UP.format(what=func.__name__.partition(".")[0].strip("_")))


class _Stepping:
    """The hooks on one optimizer's parameters. Mutable: the parameters whose gradients are used up."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = weakref.ref(optimizer)
        self._is_dry = simulation.is_dry
        self._is_inside = False  # whether a step for a single gradient runs
        self._spent: list[Tensor] = []
        self.has_begun = False  # a weight of this step is updated, or half updated
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self.gradient_ready) for p in parameters]
        self._handles.append(optimizer.register_step_pre_hook(self.step_begins))

    def gradient_ready(self, parameter: Tensor) -> None:
        optimizer = self._optimizer()
        # A dry run has an optimizer of its own on the same parameters. Each must ignore the other's backward.
        if optimizer is None or simulation.is_dry != self._is_dry or is_accumulating():
            return
        with only(optimizer, parameter) as is_known:
            if not is_known:
                return
            self._is_inside = self.has_begun = simulation.updates = True
            try:
                optimizer.step()
            finally:
                self._is_inside = simulation.updates = False
        parameter.grad = SpentGradient(parameter)
        self._spent.append(parameter)

    def step_begins(self, optimizer: torch.optim.Optimizer, arguments: tuple, keywords: dict) -> tuple | None:
        """The loop calls `step`: it must skip the parameters that were stepped in backward."""
        # It still steps those whose gradients come only from earlier micro-batches.
        if self._is_inside:
            return None
        self._release()
        self.has_begun = False
        itself, *given = arguments
        closure = given[0] if given else keywords.get("closure")
        if closure is None:
            return None

        def stepped_within() -> Any:
            # Lightning runs backward in here, so the gradients are used up only now.
            result = closure()
            self._release()
            return result

        return (itself, stepped_within, *given[1:]), {k: v for k, v in keywords.items() if k != "closure"}

    def _release(self) -> None:
        """Take the gradients away that were used up."""
        for parameter in self._spent:
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        self._spent.clear()

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._release()


_STEPPING: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepping]" = weakref.WeakKeyDictionary()


class StepInBackward:
    """The handle of the lever. `undo()`, or leaving the `with` block, removes it. The optimizer keeps its states."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which backward only adds to the gradients: for every micro-batch except the last."""
        return accumulation()

    def undo(self) -> None:
        """Remove the lever. Calling it again does nothing."""
        stepping = _STEPPING.pop(self.optimizer, None)
        if stepping is not None:
            stepping.remove()

    remove = undo

    def __enter__(self) -> "StepInBackward":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.undo()


def step_in_backward(
    optimizer: torch.optim.Optimizer | OptimizerFactory, model: nn.Module | Iterable[nn.Parameter]
) -> StepInBackward:
    """Step each parameter of an optimizer when its gradient is ready, and free the gradient at once.

    The training loop does not change: `optimizer.step()` and `zero_grad()` end the step, and schedulers need them.
    Weights and states are bit-equal to those of stepping afterwards, for optimizers that treat each parameter by itself
    (all of PyTorch's except LBFGS). With micro-batches, run every backward except the last under `handle.accumulate()`.

    Args:
        optimizer: An optimizer over the model's parameters, or a callable that makes one.
        model: A module, or the parameters that are stepped.

    Returns:
        A handle whose `undo()`, or the end of its `with` block, removes the lever.

    Raises:
        LeverError: A second backward runs without `accumulate()`, or gradients are clipped or scaled.
        InputError: The optimizer is LBFGS, or has no parameters of the model.

    Example:
        >>> import torch
        >>> from tightfit.optim import step_in_backward
        >>> model = torch.nn.Linear(8, 8)
        >>> before = model.weight.clone()
        >>> with step_in_backward(torch.optim.AdamW, model):
        ...     model(torch.ones(1, 8)).sum().backward()
        >>> torch.equal(model.weight, before)
        False
    """
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameters)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("step in backward: LBFGS needs all gradients together: use another optimizer")
    known = {id(p) for p in parameters}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise InputError("step in backward: the optimizer holds no parameter of the model: build it over this model's")
    if optimizer not in _STEPPING:
        stepping = _STEPPING[optimizer] = _Stepping(optimizer)
        weakref.finalize(optimizer, stepping.remove)
    return StepInBackward(optimizer)


def steps_in_backward(optimizer: torch.optim.Optimizer) -> bool:
    """True if the lever is applied to this optimizer."""
    return optimizer in _STEPPING


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """True if the lever is on this optimizer and backward has begun to update weights since the last whole step."""
    return optimizer in _STEPPING and _STEPPING[optimizer].has_begun


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[bool]:
    """A context in which the optimizer has only this parameter, in its group. Yields whether it has it at all."""
    groups = optimizer.param_groups
    group = next((g for g in groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        yield False
        return
    alone = {**group, "params": [parameter]}
    optimizer.param_groups = [alone]
    try:
        yield True
    finally:
        optimizer.param_groups = groups
        group.update({key: value for key, value in alone.items() if key != "params"})


def gradient_memory(parameter: Tensor) -> Tensor | None:
    """The tensor that holds a parameter's gradient, which may be on the host.

    None if there is no gradient, or if a step in backward has used it up.
    """
    gradient = parameter.grad
    if isinstance(gradient, HostGradient):
        return gradient.host()
    return None if isinstance(gradient, SpentGradient) else gradient
