"""Answers reads of a tensor's numbers that bypass the dispatcher in a dry run: numpy, DLPack, lists, text.

A read of a small unknown tensor gets the documented answer (`tracing/questions.py`). A read of a large one is refused
with its line, because an unbacked tensor has no memory to read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.errors import TraceError
from tightfit.runtime.internals import no_modes, text_of_tensors_by
from tightfit.tracing.dry_run import DryRun, answers_itself
from tightfit.tracing.questions import calling_line
from tightfit.tracing.shapes import KNOWN_LIMIT
from tightfit.tracing.unbacked import is_unbacked

_READERS = ("numpy", "tolist", "__array__", "__dlpack__")


@contextmanager
def reads_answered(dry: DryRun) -> Iterator[None]:
    """A context in which arrays and lists of unknown tensors contain the documented answers, and texts no numbers."""
    tensor: Any = torch.Tensor
    before = {name: tensor.__dict__.get(name) for name in _READERS}
    # Whoever copies a tensor's methods meanwhile (dynamo, where it is imported in the dry run) keeps these for ever:
    # afterwards they hold nothing of the step, and read.
    running = [dry]
    for name in _READERS:
        setattr(tensor, name, _answering(running, name, getattr(tensor, name)))
    try:
        with text_of_tensors_by(_text):
            yield
    finally:
        running.clear()
        for name, own in before.items():
            if own is None:
                delattr(tensor, name)
            else:
                setattr(tensor, name, own)


def _answering(running: list[DryRun], name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not running or answers_itself(type(self)) or not _is_unknown(running[0], self):
            return read(self, *args, **kwargs)
        if self.numel() > KNOWN_LIMIT:
            raise TraceError(
                f"{calling_line()}: Tensor.{name} of a tensor of {tuple(self.shape)} cannot be run dry: a dry run does "
                "not compute its numbers: remove this call from the step"
            )
        is_float = self.is_floating_point() or self.is_complex()
        is_bool = self.dtype == torch.bool
        value = running[0].questions.number(float if is_float else bool if is_bool else int, running[0].phase)
        running[0].questions.note("numbers read from a tensor", repr(value))
        with no_modes():  # the assumed tensor is not the step's, and must not be counted
            assumed = torch.full(self.shape, value, dtype=self.dtype)
        return read(assumed, *args, **kwargs)

    return answer


def _is_unknown(dry: DryRun, tensor: torch.Tensor) -> bool:
    cell = dry.ledger.cell_of(tensor)
    return is_unbacked(tensor) if cell is None else not cell.known


def _text(tensor: torch.Tensor) -> str | None:
    """The text in place of an unbacked tensor's numbers; None for other tensors."""
    return "..." if type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_unbacked(tensor) else None
