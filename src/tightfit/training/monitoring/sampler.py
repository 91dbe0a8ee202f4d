"""Reads memory counters at changes of phase, within a fixed share of the time."""

import time
from typing import Any

import torch

from tightfit.memory.counters import Reading, read_counters
from tightfit.tracing.record import Phase
from tightfit.training.monitoring.recorded import Sample, thinned

SHARE = 0.005  # of the elapsed time: half of what the monitor may cost when it only samples
FIRST_SAMPLES = 16  # taken whatever they cost
MOST_SAMPLES = 2048


class Sampler:
    """Mutable: the samples so far, and the highest figures of each phase.

    The counters are high-water marks. If a mark rose during a phase, the phase reached it. If not, the phase reached at
    least the memory in use at its two ends. If the mark rose over several phases without a reading between them, the
    rise is attributed to none of them.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.rss_peaks: dict[Phase, int] = {}
        self.allocated_peaks: dict[Phase, int] = {}
        self._device = torch.device("cpu")
        self._began = time.perf_counter()
        self._spent = 0.0
        self._last: Reading | None = None
        self._taken = 0
        self._every = 1  # readings per kept sample
        self._missed = False  # whether a phase ended without a reading since the last one
        self.rss_peak = 0
        self.allocated_peak = 0

    def start(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        self._last = read_counters(device)

    def sample(self, step: int, phase: Phase, *, always: bool = False) -> None:
        """Read the counters at the end of a phase, unless sampling has used up its share of the time."""
        began = time.perf_counter()
        is_affordable = self._taken < FIRST_SAMPLES or self._spent <= SHARE * (began - self._began)
        if self._last is None or not (always or is_affordable):
            self._missed = True
            return
        reading = read_counters(self._device)
        self._raise_peaks(phase, self._last, reading)
        self._last = reading
        self._taken += 1
        if always or self._taken % self._every == 0:
            self._keep(Sample(began - self._began, step, str(phase), *_figures(reading)))
        self._spent += time.perf_counter() - began

    def skip(self) -> None:
        """Read the counters again after code that is no part of the training."""
        if self._last is not None:
            self._last = read_counters(self._device)

    def _raise_peaks(self, phase: Phase, before: Reading, after: Reading) -> None:
        rss = _reached(before.rss_bytes, before.rss_highest_bytes, after.rss_bytes, after.rss_highest_bytes)
        self.rss_peak = max(self.rss_peak, rss)
        here = after.rss_bytes if self._missed else rss
        self.rss_peaks[phase] = max(self.rss_peaks.get(phase, 0), here)
        if after.allocated_bytes is not None:
            allocated = _reached(
                before.allocated_bytes or 0,
                before.allocated_highest_bytes or 0,
                after.allocated_bytes,
                after.allocated_highest_bytes or 0,
            )
            self.allocated_peak = max(self.allocated_peak, allocated)
            here = after.allocated_bytes if self._missed else allocated
            self.allocated_peaks[phase] = max(self.allocated_peaks.get(phase, 0), here)
        self._missed = False

    def _keep(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) >= MOST_SAMPLES:
            self.samples = thinned(self.samples, MOST_SAMPLES)
            self._every *= 2


def _figures(reading: Reading) -> tuple[Any, ...]:
    return (
        reading.rss_bytes,
        reading.rss_highest_bytes,
        reading.allocated_bytes,
        reading.allocated_highest_bytes,
        reading.reserved_bytes,
    )


def _reached(before: int, highest_before: int, after: int, highest_after: int) -> int:
    """The highest point between two readings, as far as the counters show it."""
    return highest_after if highest_after > highest_before else max(before, after)
