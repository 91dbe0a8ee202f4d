"""The parts of a diagnosis as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tightfit.recipes.ways import Remedy


@dataclass(frozen=True)
class Holder:
    """A holder of memory at the peak, such as a module or a group of tensors."""

    name: str
    bytes: int


@dataclass(frozen=True)
class DiagnosisRecord:
    """Why memory ran out, or what uses it: the place of the peak, its holders, and ranked remedies. Bytes are ints.

    `findings` are sentences about facts, and `advice` are sentences about what to do besides the remedies.
    `expected_bytes` is the peak of a dry run of the same step, `peak_bytes` the subject's own peak. `limit_bytes` is
    the memory that was available for the step, if the subject says it.
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
    fragmentation_bytes: int | None = None  # reserved from the device, and not in use by a tensor
    by_category: Mapping[str, int] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    advice: tuple[str, ...] = ()
