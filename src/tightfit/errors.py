"""Every error that tightfit raises on purpose.

TightfitError                    exit code 2 unless a subclass says otherwise
├── InputError                   the user's input is wrong: what, where, what to do
│   ├── ConfigError              a key, a value or a section of the configuration
│   ├── DataError                a corpus, a line of it, a tokenizer
│   ├── ModelError               a model that cannot be loaded, built or run
│   ├── SourceError              a folder that holds no model to compress, or one that cannot be compressed
│   ├── QualityError             a compression that loses more quality than it may; nothing was written
│   ├── DeviceError              an unknown or absent device
│   ├── BudgetError              a budget that cannot be read
│   ├── RewardError              a reward function that raises, or returns something else than it has to
│   ├── CheckpointError          a checkpoint that is damaged, or of something else than what it is read into
│   └── OutputError              a folder that cannot be written
├── LeverError                   a lever that cannot be applied here
│   ├── RecomputeError           a block whose recompute would not be exact, by name
│   └── CompileError             a block that PyTorch's compiler does not take as a whole
├── TraceError                   a training step that cannot be run dry
├── CannotFit                    exit code 3: no plan fits the budget; carries the least that does
├── RankError                    a process of several is lost, or the processes differ in what they are to do
│   └── PeerFailed               another process has failed, with its exit code; it has reported why
├── RecoveryError                a step that ran out of memory and cannot be undone or finished exactly, by name
└── VerificationFailed           exit code 4: a plan changed what the step computes
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

LONGEST_LINE = 1000  # characters of an error about a configuration, and of what other code has said


def shortened(line: str) -> str:
    """The line without the middle of a very long one."""
    return line if len(line) <= LONGEST_LINE else f"{line[:600]} ... {line[-300:]}"


def in_one_line(error: BaseException) -> str:
    """The text of an error of somebody else's code, on one line; empty where it says nothing.

    PyTorch writes a whole module into the error of a call with a wrong argument: pages, for a transformer.
    """
    return shortened(" ".join(str(error).split()))


def said_by(error: BaseException) -> str:
    """The kind of an error of somebody else's code, and its text."""
    line = in_one_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def why_unreadable(error: Exception) -> str:
    """The reason in an error of reading a file, on one line, where the file is named beside it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: {error.reason} at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return (
            f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}" if error.doc else "it is empty"
        )
    return in_one_line(error) or type(error).__name__


class TightfitError(Exception):
    """Base of every error raised on purpose; its text is one clear line."""

    exit_code = 2


class InputError(TightfitError):
    """The user's input is wrong."""


class ConfigError(InputError):
    """A key, a value or a section of the configuration is wrong.

    The line quotes keys and overrides as the user wrote them: line ends and control characters in it are escaped, and
    the middle of a very long one is left out.
    """

    def __init__(self, message: str):
        line = "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in message)
        super().__init__(shortened(line))


class DataError(InputError):
    """A corpus, a line of it or a tokenizer is wrong."""


class ModelError(InputError):
    """A model cannot be loaded, built or run."""


class SourceError(InputError):
    """A folder holds no model to compress, or one that cannot be compressed."""


class RewardError(InputError):
    """A reward function raises, or returns something else than one finite number for each completion."""


class QualityError(InputError):
    """A compression loses more quality than it may. Nothing was written."""


class DeviceError(InputError):
    """A device is unknown or absent."""


class BudgetError(InputError):
    """A budget cannot be read, or is not one."""


class CheckpointError(InputError):
    """A checkpoint is damaged, or of something else than what it is read into."""


class OutputError(InputError):
    """An output folder cannot be written."""


class LeverError(TightfitError):
    """A lever cannot be applied here."""


class RecomputeError(LeverError):
    """Recomputing this block would not be exact; the message names the operator or state."""


class CompileError(LeverError):
    """A block that cannot be compiled or captured as a whole, or not in this step; the message has its reason."""


class TraceError(TightfitError):
    """A training step cannot be run dry."""


class CannotFit(TightfitError):
    """No plan fits the budget.

    `least_bytes` is the smallest peak that any combination of the allowed levers reaches. Where that is within the
    budget and a CUDA device has no room for it, `taken_bytes` is what the step takes there as a whole, else None.
    `refusal` is what was asked for, where a plan was (`planner.search.fastest.Refusal`).
    """

    exit_code = 3
    # Given by `tightfit/__init__.py`: the rooms that find ways out import this file.
    find_ways_out: ClassVar[Callable[[Any], Sequence[Any]]]

    def __init__(self, message: str, least_bytes: int, taken_bytes: int | None = None, refusal: Any = None):
        super().__init__(message)
        self.least_bytes = least_bytes
        self.taken_bytes = taken_bytes
        self.refusal = refusal
        self._ways_out: Sequence[Any] | None = None

    @property
    def ways_out(self) -> Sequence[Any]:
        """Ways to train all the same (`recipes.ways.WayOut`), ranked, each run dry; empty where no plan was asked for.

        They are looked for when this is first read, which takes several dry runs.
        """
        found = self._ways_out
        if found is None:
            found = self._ways_out = type(self).find_ways_out(self.refusal)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # It crosses to another process whole, without the model that was asked about.
        return type(self), (str(self), self.least_bytes, self.taken_bytes), {"_ways_out": self._ways_out}


class RankError(TightfitError):
    """One of several processes that train together is lost or silent, or they differ in what they are to do."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.exit_code)


class PeerFailed(RankError):
    """Another process has failed and has said why; this one ends with it, and with its exit code."""


class RecoveryError(TightfitError):
    """A training step ran out of memory, and can neither be undone nor be finished exactly; the message says why."""


class VerificationFailed(TightfitError):
    """A plan changed what the step computes."""

    exit_code = 4
