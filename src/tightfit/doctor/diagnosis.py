"""What a diagnosis says: plain data that prints and is written as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Remedy:
    """A way to need less memory, as the line to add.

    The figures are those of a new dry run of the step with the remedy on; None where model and batch were not at hand.
    `exactness` says what happens to the results: "exact", "rounding" or "inexact".
    """

    name: str
    exactness: str
    python: str
    yaml: str
    saved_bytes: int | None = None
    added_seconds: float | None = None  # a step; negative where it is faster
    peak_bytes: int | None = None
    fits: bool | None = None  # in the memory there was, where that is known


@dataclass(frozen=True)
class Holder:
    """Who holds memory at the peak."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Diagnosis:
    """Why memory ran out, or where it goes: the place of the peak, who holds it, and ranked remedies. Bytes are ints.

    `findings` are the sentences of what is known, `advice` of what to do besides the remedies. `expected_bytes` is the
    peak of a dry run of the same step, `peak_bytes` the one that the subject had. `limit_bytes` is what there was for
    the step, where the subject says it.
    """

    subject: str
    findings: tuple[str, ...]
    phase: str | None = None
    module: str | None = None
    operator: str | None = None
    category: str | None = None  # the largest at the peak
    peak_bytes: int | None = None
    expected_bytes: int | None = None
    requested_bytes: int | None = None
    limit_bytes: int | None = None
    fragmentation_bytes: int | None = None  # reserved from the device and used by no tensor
    by_category: Mapping[str, int] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    advice: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, path: str | Path) -> None:
        """Write the diagnosis to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        from tightfit.doctor.describe import describe_diagnosis

        return describe_diagnosis(self)
