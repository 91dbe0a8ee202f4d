"""Finds the phase of a training step in any loop, by hooks.

Forward begins when the model is called. Backward begins when the gradient of one of its results arrives. The
optimizer's phase begins when backward ends; it includes clipping, setting gradients to None and loading the next batch.
A step ends when the model is called again after an optimizer stepped (after a backward, if there is no optimizer). So
several optimizers and several micro-batches belong to one step. Code outside of the training (a dry run, a comparison
of two runs) is ignored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tightfit.runtime.internals import at_end_of_backward, current_node
from tightfit.runtime.nested import flatten
from tightfit.runtime.outside import OutsideLoop
from tightfit.tracing.record import Phase


class Stage:
    """Mutable: the running phase.

    Callbacks: `on_change(old, new)` before the phase changes, `on_inputs(args, kwargs)` at each call of a model,
    `on_optimizer(optimizer)` before it steps, `on_step()` at the end of a step.
    """

    def __init__(
        self,
        on_change: Callable[[Phase, Phase], None],
        on_inputs: Callable[[tuple, dict], None],
        on_optimizer: Callable[[torch.optim.Optimizer], None],
        on_step: Callable[[], None],
        *,
        has_optimizer: bool,
    ):
        self.outside = OutsideLoop()
        self.phase = Phase.FORWARD
        self.on_change = on_change
        self.on_inputs = on_inputs
        self.on_optimizer = on_optimizer
        self.on_step = on_step
        self.has_optimizer = has_optimizer
        self._stepped = False  # an optimizer has stepped, so the next call of the model begins a new step
        self._handles: list[Any] = []

    def follow_model(self, model: nn.Module) -> None:
        self._handles += [
            model.register_forward_pre_hook(self.forward_begins, with_kwargs=True),
            model.register_forward_hook(self._forward_ends),
        ]

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles += [
            optimizer.register_step_pre_hook(self.optimizer_begins),
            optimizer.register_step_post_hook(self.optimizer_ends),
        ]

    def remove(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.on_change(self.phase, phase)
            self.phase = phase

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.outside or current_node() is not None:  # within backward, a checkpoint recomputes the whole model
            return
        if self._stepped:
            self._stepped = False
            self.on_step()
        self.enter(Phase.FORWARD)
        self.on_inputs(args, kwargs)

    def _forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.outside:
            return
        for result in _tensors(output):
            if result.requires_grad and result.grad_fn is not None:
                result.register_hook(self._gradient_arrives)
                if result.dim() == 0:  # a loss: its gradient arrives before all others, so one hook is enough
                    return

    def _gradient_arrives(self, gradient: torch.Tensor) -> None:
        self.backward_begins()

    _gradient_arrives.only_waits = True  # pyright: ignore[reportFunctionMemberAccess] (logits that are never whole stay so)

    def backward_begins(self) -> None:
        """Note that backward runs. Call it inside a backward."""
        if self.phase is not Phase.BACKWARD:
            self.enter(Phase.BACKWARD)
            at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        if self.phase is Phase.BACKWARD:
            self.enter(Phase.OPTIMIZER)
            self._stepped = self._stepped or not self.has_optimizer

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if not self.outside:
            self.enter(Phase.OPTIMIZER)
            self.on_optimizer(optimizer)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._stepped = self._stepped or not self.outside

    def ends(self) -> None:
        """End the monitoring. A step whose optimizer has stepped counts as complete."""
        if self._stepped:
            self._stepped = False
            self.on_step()


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in a model's result (lists, tuples, dicts, dataclasses), scalars first."""
    tensors = [leaf for leaf in flatten(output).leaves if isinstance(leaf, torch.Tensor)]
    return sorted(tensors, key=torch.Tensor.dim)
