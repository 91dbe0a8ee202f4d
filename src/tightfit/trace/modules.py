"""Which module an operator belongs to: in forward the innermost one running, in backward that of the forward
operator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tightfit.internals import current_node, newest_sequence_number
from tightfit.trace.record import Phase


class ModuleTracker:
    """Follows forwards by global hooks, and backwards by the sequence numbers that autograd gives its nodes."""

    def __init__(self, model: nn.Module):
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.stack: list[str] = []
        self.by_sequence: dict[int, str] = {}
        self.handles: list[Any] = []

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

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.paths.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    @property
    def current(self) -> str:
        return self.stack[-1] if self.stack else ""

    def recomputing(self, phase: Phase) -> bool:
        """Whether a forward runs inside backward: somebody's checkpoint."""
        return phase is Phase.BACKWARD and bool(self.stack)

    def attribute(self, phase: Phase) -> str:
        """The module of the operator that is running."""
        node = current_node()
        if phase is Phase.FORWARD or (self.stack and node is None):
            # The node of a differentiable operator is made before the operator runs, and numbered one below the next.
            self.by_sequence[newest_sequence_number()] = self.current
            return self.current
        if node is None:
            return ""
        if self.stack:
            self.by_sequence[newest_sequence_number()] = self.current
            return self.current
        return self.by_sequence.get(node._sequence_nr(), "")
