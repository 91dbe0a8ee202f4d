"""Answers reads of numbers that a dry run does not have, and records them as assumptions.

A number read from an unknown float tensor is 1.0 (a loss or a norm: finite and ordinary). From an integer tensor it is
0. From a boolean tensor it is False (no overflow, no NaN). Two unknown tensors are not equal.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.record import Assumption

aten = torch.ops.aten
UNKNOWN_FLOAT = 1.0
ASKING = frozenset({aten._local_scalar_dense.default, aten.equal.default})  # return a number, not a tensor
_OURS = ("torch.", "tightfit.tracing", "tightfit.levers", "tightfit.step", "tightfit.runtime")


@dataclass(frozen=True)
class Answer:
    value: Any


class Questions:
    """Answers questions, and records each one with its module and its line."""

    def __init__(self, modules: ModuleTracker):
        self.modules = modules
        self.asked: dict[tuple[str, str], Assumption] = {}

    def ask(self, func: Any, args: tuple) -> Answer | None:
        """The documented answer if this operator reads a number from a tensor, else None."""
        if func is aten._local_scalar_dense.default:
            source = args[0]
            value: Any = UNKNOWN_FLOAT if source.is_floating_point() else False if source.dtype == torch.bool else 0
            self.note("a number read from a tensor", repr(value))
            return Answer(value)
        if func is aten.equal.default:
            self.note("whether two tensors are equal", "False")
            return Answer(False)
        return None

    def note(self, question: str, answer: str, *, moves_peak: bool = False) -> None:
        where = calling_line()
        self.asked.setdefault((question, where), Assumption(question, self.modules.current, where, answer, moves_peak))


def calling_line() -> str:
    """File and line of the innermost frame outside of PyTorch and this package: the user's code."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_OURS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
