"""The record of a monitored training as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tightfit.memory.failure import OutOfMemory
from tightfit.memory.pool import PoolStatistics
from tightfit.planner.records import StepFigures


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at the end of a phase, in bytes. CUDA's are None on a CPU."""

    seconds: float  # since the monitoring began
    step: int
    phase: str
    rss_bytes: int
    rss_highest_bytes: int
    allocated_bytes: int | None
    allocated_highest_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True)
class RecordedFailure:
    """The exception that ended the monitored training."""

    kind: str
    message: str
    phase: str | None
    module: str | None
    operator: str | None = None
    out_of_memory: OutOfMemory | None = None


@dataclass(frozen=True)
class RecordedTraining:
    """A monitored training. Bytes are ints.

    `traced` are the figures of the step that was recorded operator by operator, and `traced_step` is its number from 1
    (0: no step). The trace is `complete` unless the training ended inside it. `peak_source` names the source of
    `peak_bytes`: the traced step, CUDA's allocator, or resident memory. `pools` are the final statistics of buffer
    pools outside of the allocators (offload), by name.
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
    traced: StepFigures | None
    model: str
    parameters: int
    optimizer: str | None
    device: str
    allocator: Mapping[str, int] | None
    samples: tuple[Sample, ...]
    failure: RecordedFailure | None
    pools: Mapping[str, PoolStatistics]
    script: str = ""

    @property
    def peak_phase(self) -> str | None:
        """The phase of the traced step's peak, or else the phase with the highest peak."""
        if self.traced is not None:
            return self.traced.peak_phase
        return max(self.phase_peaks, key=self.phase_peaks.__getitem__, default=None)

    @property
    def peak_module(self) -> str | None:
        return None if self.traced is None else self.traced.peak_module


def thinned(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Every other sample once there are `count`, so that a long training keeps a bounded number of them."""
    return list(samples if len(samples) < count else samples[::2])
