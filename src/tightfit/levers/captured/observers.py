"""Lets captured programs run under dispatch modes that only observe, as the monitor's does in its first steps.

Run by the recorder instead, a block would take other bytes in the steps that are observed than in all others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.runtime.internals import active_modes, compiled_code_on, is_active, no_modes


class Observers:
    """The modes of this thread, the one entered last first. It stands in `simulators.captured` while a block runs."""

    def __init__(self, modes: Sequence[TorchDispatchMode]):
        self.modes = modes

    @contextmanager
    def outside(self) -> Iterator[None]:
        """A context without the modes and their hooks on modules, in which dynamo records blocks."""
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(_hooks_of(mode)())
            stack.enter_context(compiled_code_on())
            stack.enter_context(no_modes())
            yield

    def run(self, program: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a program under the modes."""
        if is_active(self.modes[0]):
            return program(args)
        with no_modes(), ExitStack() as stack:
            for mode in reversed(self.modes):
                stack.enter_context(mode)
            return program(args)


def observers() -> Observers | None:
    """The dispatch modes of this thread, if there are any and all of them only observe."""
    modes = active_modes()
    return Observers(modes) if modes and all(map(_hooks_of, modes)) else None


def _hooks_of(mode: TorchDispatchMode) -> Any:
    """The context that a mode that only observes offers: one in which its hooks are off the modules."""
    return getattr(mode, "without_hooks", None)
