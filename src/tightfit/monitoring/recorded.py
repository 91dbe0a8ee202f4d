"""What watching a training leaves, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tightfit.memory.failure import OutOfMemory
from tightfit.memory.pool import PoolStatistics
from tightfit.planner.records import StepFigures


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
class RecordedTraining:
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
    traced: StepFigures | None
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


def thinned(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Every other sample once there are `count`, so that a long training keeps a bounded number of them."""
    return list(samples if len(samples) < count else samples[::2])
