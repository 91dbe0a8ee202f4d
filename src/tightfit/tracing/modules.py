"""Which module an operator belongs to: in forward the innermost one running, in backward that of the forward
operator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tightfit.runtime.activity import now
from tightfit.runtime.internals import current_node, newest_sequence_number
from tightfit.runtime.module_paths import named_modules
from tightfit.tracing.record import ModuleCall, Phase


class ModuleTracker:
    """Follows forwards by global hooks, and backwards by the sequence numbers that autograd gives its nodes.

    `calls` are the forwards that ran, `open_calls` those that are running, by their places in `calls`. Time is what
    `clock` says: the number of operators so far.
    """

    def __init__(self, model: nn.Module):
        self.paths = {id(module): path for path, module in named_modules(model)}
        self.stack: list[str] = []
        self.by_sequence: dict[int, tuple[str, int]] = {}
        self.handles: list[Any] = []
        self.calls: list[ModuleCall] = []
        self.open_calls: list[int] = []
        self.clock: Callable[[], int] = lambda: 0

    def __enter__(self) -> "ModuleTracker":
        self.handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self.handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, modules are not followed: what runs belongs to the one that is running."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def begin_again(self) -> None:
        """Forget the calls so far: what is recorded starts here."""
        self.calls.clear()
        self.by_sequence.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self.paths.get(id(module), type(module).__name__)
        self.stack.append(path)
        caller = self.open_calls[-1] if self.open_calls else -1
        self.open_calls.append(len(self.calls))
        self.calls.append(ModuleCall(path, caller, self.clock(), self.clock()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()
        if self.open_calls:  # a call that had begun before the watching did is on the stack only
            number = self.open_calls.pop()
            self.calls[number] = self.calls[number]._replace(end=self.clock())

    @property
    def current(self) -> str:
        return self.stack[-1] if self.stack else ""

    @property
    def current_call(self) -> int:
        return self.open_calls[-1] if self.open_calls else -1

    def phase(self, phase: Phase) -> Phase:
        """The phase of the operator that is running in a part of the step. A forward inside backward is somebody's
        checkpoint; a loss may take gradients too, whose backward is one although the step's has not begun.
        """
        if phase is Phase.FORWARD and now.region is None and current_node() is not None:
            phase = Phase.BACKWARD
        return Phase.RECOMPUTE if phase is Phase.BACKWARD and self.stack else phase

    def attribute(self, phase: Phase) -> tuple[str, int]:
        """The module of the operator that is running, and its call."""
        node = current_node()
        if node is None and not self.stack and phase is not Phase.FORWARD:
            return "", -1
        # The node of a differentiable operator is made before the operator runs, and numbered one below the next.
        if node is None or self.stack:
            here = self.by_sequence[newest_sequence_number()] = self.current, self.current_call
            return here
        here = self.by_sequence.get(node._sequence_nr(), ("", -1))
        if torch.is_grad_enabled():  # a gradient of gradients follows
            self.by_sequence.setdefault(newest_sequence_number(), here)
        return here
