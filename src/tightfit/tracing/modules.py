"""Finds the module of each operator: in forward the innermost running one, in backward that of the forward operator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tightfit.levers.activity import activity
from tightfit.runtime.internals import checkpoint_is_around, current_node, newest_sequence_number
from tightfit.runtime.module_paths import named_modules
from tightfit.tracing.record import ModuleCall, Phase


class ModuleTracker:
    """Follows forwards by global hooks, and backwards by the sequence numbers of autograd's nodes.

    `calls` are the forwards so far. `open_calls` are the running ones, as indices into `calls`. `operators` are those
    that ran so far, whose number is the time.
    """

    def __init__(self, model: nn.Module):
        self.paths = {id(module): path for path, module in named_modules(model)}
        self.stack: list[str] = []
        self.by_sequence: dict[int, tuple[str, int]] = {}
        self.handles: list[Any] = []
        self.calls: list[ModuleCall] = []
        self.open_calls: list[int] = []
        self.operators: Sequence[Any] = ()

    def __enter__(self) -> "ModuleTracker":
        self.handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which modules are not followed: all operators belong to the module that runs now."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def begin_again(self) -> None:
        """Forget the calls so far, and start to record here."""
        self.calls.clear()
        self.by_sequence.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self.paths.get(id(module), type(module).__name__)
        self.stack.append(path)
        caller = self.open_calls[-1] if self.open_calls else -1
        self.open_calls.append(len(self.calls))
        now = len(self.operators)
        self.calls.append(ModuleCall(path, caller, now, now, checkpoint_is_around()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()
        if self.open_calls:  # the monitor may begin inside a model's call, which is then on the stack only
            number = self.open_calls.pop()
            self.calls[number] = self.calls[number]._replace(end=len(self.operators))

    def mark_compiled(self) -> None:
        """Note that code under `torch.compile` runs in the running call."""
        if self.open_calls:
            number = self.open_calls[-1]
            self.calls[number] = self.calls[number]._replace(runs_compiled=True)

    @property
    def current(self) -> str:
        return self.stack[-1] if self.stack else ""

    @property
    def current_call(self) -> int:
        return self.open_calls[-1] if self.open_calls else -1

    def phase(self, phase: Phase) -> Phase:
        """The phase of the running operator, given the part of the step."""
        # A loss may compute gradients itself. That is backward, although the step's own backward has not begun: counted
        # as forward, everything that it reads would look held.
        if phase is Phase.FORWARD and activity.region is None and current_node() is not None:
            phase = Phase.BACKWARD
        # A module's forward inside backward is a checkpoint of the model's own.
        return Phase.RECOMPUTE if phase is Phase.BACKWARD and self.stack else phase

    def attribute(self, phase: Phase) -> tuple[str, int]:
        """The path of the running operator's module, and its call."""
        node = current_node()
        if node is None and not self.stack and phase is not Phase.FORWARD:
            return "", -1
        # Autograd makes the node of a differentiable operator before the operator runs, so it is the newest one.
        if node is None or self.stack:
            here = self.by_sequence[newest_sequence_number()] = self.current, self.current_call
            return here
        here = self.by_sequence.get(node._sequence_nr(), ("", -1))
        if torch.is_grad_enabled():  # with `create_graph`, backward makes nodes for a second backward
            self.by_sequence.setdefault(newest_sequence_number(), here)
        return here
