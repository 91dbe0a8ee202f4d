"""Finds the phase of a training step, and the user's own line, from a stack of calls."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python[0-9.]+[/\\]|[/\\]torchinductor_|^<")
_TORCH = re.compile(r"[/\\]torch[/\\]")


class Frame(NamedTuple):
    """One call on a stack, with its line of code where a log has it."""

    filename: str
    line: int
    name: str
    code: str = ""

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


_BACKWARD = re.compile(r"\.backward\(")
_STEP = re.compile(r"(?:optim\w*|opt|scaler|solver)\.step\(", re.IGNORECASE)
_OPTIMIZER_FILE = re.compile(r"[/\\](optim|optimizers?)[/\\]|[/\\](adam\w*|optimizer|stage_1_and_2|stage3)\.py$")
_AUTOGRAD_FILE = re.compile(r"[/\\]torch[/\\](autograd[/\\]|_tensor\.py)")
_MODULE_FILE = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py$")
_LOADS = re.compile(r"^(from_pretrained|_load_pretrained_model|load_state_dict|load_model|_apply|cuda|to)$")


def phase_in_log(innermost_first: Sequence[Frame]) -> str | None:
    """Forward, backward or optimizer, from the calls and lines of a traceback; None where they do not show it.

    The innermost call decides, but for calls of forward below backward, which recompute.
    """
    phase = None
    for frame in innermost_first:
        calls_backward = frame.name == "_engine_run_backward" or _BACKWARD.search(frame.code)
        if calls_backward or (_AUTOGRAD_FILE.search(frame.filename) and frame.name == "backward"):
            return phase if phase == "optimizer" else "backward"
        if phase is not None:
            continue
        if frame.name != "closure" and (_STEP.search(frame.code) or _is_optimizers(frame)):
            phase = "optimizer"
        elif frame.name == "forward" or (_MODULE_FILE.search(frame.filename) and frame.name.endswith("_call_impl")):
            phase = "forward"
    return phase


def _is_optimizers(frame: Frame) -> bool:
    return frame.name in ("step", "_init_group", "_multi_tensor_adamw", "initialize_optimizer_states") and bool(
        _OPTIMIZER_FILE.search(frame.filename)
    )


def is_loading(innermost_first: Sequence[Frame]) -> bool:
    """True if weights were loaded, or moved to a device: no forward had begun."""
    return phase_in_log(innermost_first) is None and any(_LOADS.match(frame.name) for frame in innermost_first)


def is_torchs(frame: Frame) -> bool:
    """True if a call is in PyTorch's own code, or Python's."""
    return bool(_TORCH.search(frame.filename)) or not frame.filename.endswith(".py")


def users_frame(innermost_first: Sequence[Frame]) -> Frame | None:
    """The innermost call in the user's own code, else in a library other than PyTorch; None if there is neither."""
    python = [frame for frame in innermost_first if frame.filename.endswith(".py")]
    own = next((frame for frame in python if not _LIBRARY.search(frame.filename)), None)
    return own or next((frame for frame in python if not _TORCH.search(frame.filename)), None)


# Launchers write which process speaks before each line: torchrun, Ray, DeepSpeed with --tee.
_SPEAKER = re.compile(r"^\s*(?:\[rank\d+\]:|\([^()]*pid=\d+[^()]*\)|\[[\w:]+\]:)")
_BEGINNING = "Traceback (most recent call last)"
_CALL = re.compile(r'File "([^"]+)", line (\d+), in (.+?)\s*$')
_DRAWN_CALL = re.compile(r"[│|]\s+(\S+\.py):(\d+) in (\S+)")  # by rich, whose lines of code have numbers
_DRAWN_CODE = re.compile(r"[│|]\s+❱\s*\d+\s*[│|]?\s*(.+?)\s*[│|]?$")


def frames_in_log(text: str, end: int | None = None) -> list[Frame]:
    """The calls of the traceback above the error that begins at `end` in a text (else of the last one), innermost
    first: those of the process that wrote the error.
    """
    above = text if end is None else text[:end]
    speaker = _SPEAKER.match(text[above.rfind("\n") + 1 :])
    lines = above.splitlines()
    if speaker is not None:
        lines = [line for line in lines if line.startswith(speaker.group())]
    begins = [number for number, line in enumerate(lines) if _BEGINNING in line]
    found: list[Frame] = []
    for number in range(begins[-1] if begins else 0, len(lines)):
        called = _CALL.search(lines[number]) or _DRAWN_CALL.search(lines[number])
        if called is not None:
            found.append(Frame(called[1], int(called[2]), called[3], _code_below(lines, number, speaker)))
    return found[::-1]


def _code_below(lines: Sequence[str], number: int, speaker: re.Match[str] | None) -> str:
    """The line of code below a call, if there is one."""
    for line in lines[number + 1 : number + 12]:
        if _CALL.search(line) or _DRAWN_CALL.search(line):
            return ""
        if drawn := _DRAWN_CODE.search(line):
            return drawn[1]
        if not re.search("[│|]", line):
            return (line if speaker is None else line[speaker.end() :]).strip()
    return ""
