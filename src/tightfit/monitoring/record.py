"""What watching a training leaves: plain data that can be printed, written as JSON and diagnosed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.memory.failure import OutOfMemory
from tightfit.memory.pool import PoolStatistics
from tightfit.planner.records import Footing

FORMAT = 2
KIND = "tightfit memory record"


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters where a phase ended. `phase` is the one that ended; bytes; CUDA's are None on a CPU."""

    seconds: float  # since the watching began
    step: int
    phase: str
    rss_bytes: int
    rss_highest_bytes: int
    allocated_bytes: int | None
    allocated_highest_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True)
class Failure:
    """The exception that ended the watched training."""

    kind: str
    message: str
    phase: str | None
    module: str | None
    operator: str | None = None
    out_of_memory: OutOfMemory | None = None


@dataclass(frozen=True)
class Record:
    """A watched training. Bytes are ints.

    `traced` is the one step that was watched in every operator, `traced_step` its number from 1 (0: none was); it is
    `complete` unless the training ended inside it. `peak_source` says what `peak_bytes` is: the peak of the traced
    step, of CUDA's allocator, or of resident memory. `pools` are those of buffers outside of the allocators (offload),
    by name, as they stood at the end.
    """

    peak_bytes: int
    peak_source: str
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    phase_peaks: Mapping[str, int]
    rss_bytes: int
    rss_by_phase: Mapping[str, int]
    steps: int
    step_seconds: float | None
    traced_step: int
    complete: bool
    traced: Footing | None
    model: str
    parameters: int
    optimizer: str | None
    device: str
    allocator: Mapping[str, int] | None
    samples: tuple[Sample, ...]
    failure: Failure | None
    pools: Mapping[str, PoolStatistics]
    script: str = ""

    @property
    def peak_phase(self) -> str | None:
        """The phase of the traced step's peak; else the one whose peak is highest."""
        if self.traced is not None:
            return self.traced.peak_phase
        return max(self.phase_peaks, key=self.phase_peaks.__getitem__, default=None)

    @property
    def peak_module(self) -> str | None:
        return None if self.traced is None else self.traced.peak_module

    def to_dict(self) -> dict[str, Any]:
        """Everything, with the place of the peak on top."""
        place = {"peak_phase": self.peak_phase, "peak_module": self.peak_module}
        return {"kind": KIND, "format": FORMAT, **place, **asdict(self)}

    def to_json(self, path: str | Path) -> None:
        """Write the record to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> "Record":
        """Read a record that `to_json` wrote. Raises `InputError` where the file is not one."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(f"{path}: the record cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path}: not a memory record that this version of tightfit wrote ({error})") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Record":
        if raw.get("kind") != KIND or raw.get("format") != FORMAT:
            raise ValueError(f"kind {raw.get('kind')!r}, format {raw.get('format')!r}, wanted {KIND!r}, {FORMAT}")
        fields = {name: raw[name] for name in cls.__dataclass_fields__}
        fields |= {
            "traced": None if raw["traced"] is None else Footing.from_dict(raw["traced"]),
            "samples": tuple(Sample(**sample) for sample in raw["samples"]),
            "pools": {name: PoolStatistics(**pool) for name, pool in raw["pools"].items()},
            "failure": None if raw["failure"] is None else _failure(raw["failure"]),
        }
        return cls(**fields)

    def __str__(self) -> str:
        from tightfit.monitoring.describe import describe_record

        return describe_record(self)


def _failure(raw: Mapping[str, Any]) -> Failure:
    said = raw["out_of_memory"]
    return Failure(**{**raw, "out_of_memory": None if said is None else OutOfMemory(**said)})


def thinned(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Every other sample once there are `count`, so that a long training keeps a bounded number of them."""
    return list(samples if len(samples) < count else samples[::2])
