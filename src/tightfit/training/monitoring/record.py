"""The record of a monitored training, which can be printed, written as JSON and diagnosed."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.memory.failure import OutOfMemory
from tightfit.memory.pool import PoolStatistics
from tightfit.planner.records import StepFigures
from tightfit.training.monitoring.recorded import RecordedFailure, RecordedTraining, Sample

FORMAT = 2
KIND = "tightfit memory record"


class Record(RecordedTraining):
    """A record that can be printed, written and read."""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON. The place of the peak comes first."""
        place = {"peak_phase": self.peak_phase, "peak_module": self.peak_module}
        return {"kind": KIND, "format": FORMAT, **place, **asdict(self)}

    def to_json(self, path: str | Path) -> None:
        """Write the record to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> "Record":
        """Read a record that `to_json` wrote. Raises `InputError` if the file is not a record."""
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
            "traced": None if raw["traced"] is None else StepFigures.from_dict(raw["traced"]),
            "samples": tuple(Sample(**sample) for sample in raw["samples"]),
            "pools": {name: PoolStatistics(**pool) for name, pool in raw["pools"].items()},
            "failure": None if raw["failure"] is None else _failure(raw["failure"]),
        }
        return cls(**fields)

    def __str__(self) -> str:
        from tightfit.training.monitoring.describe import describe_record

        return describe_record(self)


def _failure(raw: Mapping[str, Any]) -> RecordedFailure:
    said = raw["out_of_memory"]
    return RecordedFailure(**{**raw, "out_of_memory": None if said is None else OutOfMemory(**said)})
