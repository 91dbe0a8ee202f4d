"""A program of a captured graph as code of PyTorch's compiler (inductor), instead of one call for each operator.

The graphs are divided as for straight programs, so the policy's decision for each operator holds. What is recomputed is
fused with what reads it. Results are exact to rounding.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from tightfit.errors import CompileError
from tightfit.levers.activity import simulators
from tightfit.levers.captured.partition import drop_unread
from tightfit.levers.captured.views import join_views
from tightfit.runtime.forked import processes_for, shared_out
from tightfit.runtime.internals import boxed, decomposed, inductor_program, inductor_source, tune_kernels_apart

Program = Callable[[list[Any]], Any]


def fused_forward(module: Any) -> "Fused":
    """The program of a graph of forward."""
    return Fused(module, ())


def fused_backward(module: Any, used_up: Sequence[int]) -> "Fused":
    """The program of a graph of backward, which may write into the saved tensors at the places `used_up`."""
    drop_unread(module.graph)
    join_views(module.graph, set())
    return Fused(module, used_up, is_backward=True)


class Fused:
    """One graph. Its code is written for dry runs, and compiled when it first really runs."""

    def __init__(self, module: Any, used_up: Sequence[int], *, is_backward: bool = False):
        self.module = module
        self.used_up = used_up
        self.is_backward = is_backward
        self.written: Program | None = None
        self.compiled: Program | None = None
        self.source: str | None = None  # what was written for it ahead of its first dry run
        card = None if simulators.captured is None else simulators.captured.card  # that a dry run simulates
        self.how = {"is_backward": is_backward, "card": card}

    @cached_property
    def graph(self) -> Any:
        """The graph in operators for which PyTorch's compiler writes kernels. Raises `CompileError`."""
        try:
            return decomposed(self.module, self.how["card"])
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CompileError(f"PyTorch's compiler: {reason}")

    def program(self) -> Program:
        def call(args: list[Any]) -> Any:
            if simulators.captured is not None:
                return self.play(args)
            if self.compiled is None:
                self.compiled = inductor_program(self.graph, self.used_up, **self.how)
                tune_kernels_apart()
            return self.compiled(args)

        return boxed(call)

    def play(self, args: list[Any]) -> Any:
        """Run the code in a dry run, without kernels."""
        if self.written is None:
            build = simulators.captured.build
            written: Program
            if self.source is not None:
                written = build(self.source).call
            else:
                written = inductor_program(self.graph, self.used_up, build=build, **self.how)
            self.written = written
        return self.written(args)

    def write(self, threads: int) -> str | None:
        """The code for dry runs, of real runs with so many threads. None if only a call can say why there is none."""
        try:
            return inductor_source(self.graph, self.used_up, threads=threads, **self.how)
        except CompileError:
            return None


def write_ahead(programs: Sequence[Fused]) -> None:
    """Write the code of these programs for their first dry run, in forks of this process where it may be forked."""
    waiting = [program for program in programs if program.written is None and program.source is None]
    waiting.sort(key=lambda program: not program.is_backward)  # the longest first
    processes = processes_for(len(waiting))
    if processes == 1:
        return  # each is written in its first dry run
    threads = torch.get_num_threads()

    # A program goes to a fork by its number: the fork has it already.
    def numbered(number: int, notice: object) -> str | None:
        return waiting[number].write(threads)

    sources = shared_out(numbered, range(len(waiting)), lambda line: None, processes)
    for program, source in zip(waiting, sources, strict=True):
        program.source = source
