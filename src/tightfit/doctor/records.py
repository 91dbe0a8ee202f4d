"""What a diagnosis is made of, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class DiagnosisRecord:
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
