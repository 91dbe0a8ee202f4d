"""The memory that a command took of the cards that it ran on, as plain data."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SETTINGS = "TIGHTFIT_RUN"  # the variable in which the processes of a run find these


@dataclass(frozen=True)
class RunSettings:
    """The settings for a process of a run: `steps` 0 means to the script's own end, `here` the machine's own cards."""

    folder: str
    torch: str
    steps: int
    values: bool
    snapshot: str | None
    here: bool

    @classmethod
    def read(cls) -> "RunSettings | None":
        text = os.environ.get(SETTINGS)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class StepOfRun:
    """One step: its highest points, and the phase and the place in the code where it had the first."""

    peak_bytes: int
    reserved_bytes: int
    phase: str
    at: str
    phase_peaks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RefusedBytes:
    """An allocation that the card had no room for. `step` counts from 1; 0 is before the first step."""

    asked_bytes: int
    at: str
    step: int
    phase: str
    message: str = ""


@dataclass(frozen=True)
class ReadValue:
    """A line that reads numbers from the card that are not known to be true."""

    at: str
    line: str
    count: int


@dataclass(frozen=True)
class RankOfRun:
    """One process on one card. Bytes.

    `by_category`, `by_module` and `by_line` are those at the peak. `outside_bytes` is the highest point outside of
    whole steps: before the first, or in one that did not end. `stopped`: ended on purpose, after the steps that were
    asked for. `caught` are the allocations that were refused before, after which the script went on.
    """

    rank: int
    card: int
    peak_bytes: int
    reserved_bytes: int
    host_peak_bytes: int
    outside_bytes: int
    steps: tuple[StepOfRun, ...]
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    by_line: Mapping[str, int]
    out_of_memory: RefusedBytes | None
    read_values: tuple[ReadValue, ...]
    curve: tuple[int, ...]  # bytes in use over the process's allocations
    model: str
    optimizer: str | None
    stopped: bool
    caught: tuple[RefusedBytes, ...] = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "RankOfRun":
        refused = raw["out_of_memory"]
        made = {
            "steps": tuple(StepOfRun(**step) for step in raw["steps"]),
            "out_of_memory": None if refused is None else RefusedBytes(**refused),
            "caught": tuple(RefusedBytes(**each) for each in raw.get("caught", ())),
            "read_values": tuple(ReadValue(**value) for value in raw["read_values"]),
            "curve": tuple(raw["curve"]),
        }
        return cls(**{**raw, **made})


@dataclass(frozen=True)
class CardRunRecord:
    """A command that was run on cards that are not there, or on this machine's (`here`).

    - `fits`: whether every process came to the end of a step after its last want of memory; None: no step ended, for
      another reason.
    - `device`, `memory_bytes`, `context_bytes`, `count`: the card, all of its memory, what a process takes of it beside
      PyTorch's allocator (assumed), and how many cards there were.
    - `peak_bytes`, `reserved_bytes`: PyTorch's own counters, of the rank with the highest.
    - `host_peak_bytes`: resident memory of the rank with the highest, without what stands for the card's memory.
    - `exit_code`: the command's own; 0 where it was stopped after the steps that were asked for.
    """

    fits: bool | None
    device: str
    count: int
    memory_bytes: int
    context_bytes: int
    peak_bytes: int
    reserved_bytes: int
    host_peak_bytes: int
    by_category: Mapping[str, int]
    steps: tuple[StepOfRun, ...]
    ranks: tuple[RankOfRun, ...]
    out_of_memory: RefusedBytes | None
    read_values: tuple[ReadValue, ...]
    values: bool
    exit_code: int
    command: tuple[str, ...]
    notes: tuple[str, ...] = ()
    here: bool = False

    @property
    def free_bytes(self) -> int:
        """The bytes of the card that are free when it is fullest."""
        return self.memory_bytes - self.context_bytes - self.reserved_bytes

    @property
    def highest(self) -> RankOfRun | None:
        """The rank with the highest peak: one that ran out of memory before all others."""
        return max(self.ranks, key=lambda rank: (rank.out_of_memory is not None, rank.peak_bytes), default=None)
