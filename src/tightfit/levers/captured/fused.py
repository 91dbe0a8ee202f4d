"""A program of a captured graph as code of PyTorch's compiler (inductor), instead of one call for each operator.

The graphs are divided as for straight programs, so the policy's decision for each operator holds. What is recomputed is
fused with what reads it. Results are exact to rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tightfit.levers.captured.partition import drop_unread
from tightfit.levers.captured.views import join_views
from tightfit.runtime.activity import now
from tightfit.runtime.internals import boxed, decomposed, inductor_program

Program = Callable[[list[Any]], Any]


def fused_forward(module: Any) -> Program:
    """The program of a graph of forward."""
    return Fused(module, ()).program()


def fused_backward(module: Any, used_up: Sequence[int]) -> Program:
    """The program of a graph of backward, which may write into the saved tensors at the places `used_up`."""
    drop_unread(module.graph)
    join_views(module.graph, set())
    return Fused(module, used_up, is_backward=True).program()


class Fused:
    """One graph. Its code is written for dry runs, and compiled when it first really runs."""

    def __init__(self, module: Any, used_up: Sequence[int], *, is_backward: bool = False):
        self.graph = decomposed(module)
        self.used_up = used_up
        self.is_backward = is_backward
        self.written: Program | None = None
        self.compiled: Program | None = None

    def program(self) -> Program:
        def call(args: list[Any]) -> Any:
            if now.dry_captured is not None:
                return self.play(args)
            if self.compiled is None:
                self.compiled = inductor_program(self.graph, self.used_up, is_backward=self.is_backward)
            return self.compiled(args)

        return boxed(call)

    def play(self, args: list[Any]) -> Any:
        """Run the code in a dry run, without kernels."""
        if self.written is None:
            build = now.dry_captured.build
            self.written = inductor_program(self.graph, self.used_up, is_backward=self.is_backward, build=build)
        return self.written(args)
