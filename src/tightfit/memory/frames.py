"""Finds the phase of a training step, and the user's own line, from a stack of calls."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python[0-9.]+[/\\]|^<")
_TORCH = re.compile(r"[/\\]torch[/\\]")


class Frame(NamedTuple):
    """One call on a stack."""

    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        name = re.split(r"[/\\]", self.filename)[-1]
        return f"{name}:{self.line} {self.name}"


def phase_of(frames: Iterable[Frame]) -> str | None:
    """Forward, backward or optimizer, from the calls on the stack; None for an empty stack.

    Backward is recognised by frames of autograd's engine, in Python or in C++ (its threads have no Python frames).
    """
    phase = None
    for frame in frames:
        if frame.name == "_engine_run_backward" or "autograd::Engine" in frame.name:
            return "backward"
        if re.search(r"[/\\]torch[/\\]optim[/\\]", frame.filename):
            return "optimizer"
        phase = "forward"
    return phase


def users_frame(innermost_first: Sequence[Frame]) -> Frame | None:
    """The innermost call in the user's own code, else in a library other than PyTorch; None if there is neither."""
    python = [frame for frame in innermost_first if frame.filename.endswith(".py")]
    own = next((frame for frame in python if not _LIBRARY.search(frame.filename)), None)
    return own or next((frame for frame in python if not _TORCH.search(frame.filename)), None)


_TRACEBACK_LINE = re.compile(r'^\s*(?:\[rank\d+\]:\s*)?File "([^"]+)", line (\d+), in (.+?)\s*$', re.MULTILINE)


def frames_in_log(text: str) -> list[Frame]:
    """The calls of the last traceback in a text, innermost first."""
    start = text.rfind("Traceback (most recent call last)")
    found = [Frame(name, int(line), call) for name, line, call in _TRACEBACK_LINE.findall(text[max(start, 0) :])]
    return found[::-1]
