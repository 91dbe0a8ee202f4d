"""Questions that a step asks of data that a dry run does not have, and the documented answers.

A number read from an unknown float is 1.0 (a loss, a norm: finite and ordinary), from an unknown integer 0, from an
unknown truth value False (nothing overflowed, nothing is NaN); two unknown tensors are not equal.
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
    """Answers, and remembers what was asked where."""

    def __init__(self, modules: ModuleTracker):
        self.modules = modules
        self.asked: dict[tuple[str, str], Assumption] = {}

    def ask(self, func: Any, args: tuple) -> Answer | None:
        """The documented answer, if this operator takes a number out of a tensor."""
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
    """File and line of the innermost frame that is the user's: neither PyTorch's nor this package's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_OURS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
