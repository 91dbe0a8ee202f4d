"""Detects other load on the machine during a measurement, from the processors' clocks and from a probe."""

import os
import statistics
import time
from dataclasses import dataclass, field

import psutil

from tightfit.devices.timing import Call

# Cores that other processes may use without harm to the figures. An idle desktop uses a quarter of a core.
TOLERATED_CORES = 0.25
# The median time of a repeated call may be this many times its least time. With the other of two cores busy, 1.03 to
# 1.05 was measured. A call that shares its core takes twice as long. The limit between the two is assumed.
TOLERATED_SPREAD = 1.15
SAMPLES = 8  # of the probe, each time
GLANCE = 0.2  # seconds of a short check


@dataclass(frozen=True)
class Observation:
    """The load during a measurement: cores used by others, the number of cores, cores used by the measurement itself,
    and the probe's median time relative to its least.
    """

    others: float
    cores: int
    threads: int
    spread: float = 1.0

    @property
    def disturbed_by(self) -> str:
        """The causes of disturbance in words; empty if there are none."""
        causes = []
        if self.others > max(TOLERATED_CORES, self.cores - self.threads):
            causes.append(f"other processes kept {self.others:.1f} of {self.cores} cores busy")
        if self.spread > TOLERATED_SPREAD:
            causes.append(f"a repeated product took {self.spread - 1:.0%} longer than its least")
        return " and ".join(causes)


@dataclass
class LoadObserver:
    """Observes the machine from its creation until `observe`. Call `sample` a few times in between."""

    probe: Call
    threads: int
    seconds: list[float] = field(default_factory=list)
    began: "ProcessorTimes" = field(default_factory=lambda: ProcessorTimes.now())

    def sample(self) -> None:
        """Time the probe a few times."""
        for _ in range(SAMPLES):
            began = time.perf_counter()
            self.probe()
            self.seconds.append(time.perf_counter() - began)

    def observe(self) -> Observation:
        """The load so far."""
        others = ProcessorTimes.now().others_since(self.began)
        spread = statistics.median(self.seconds) / min(self.seconds) if self.seconds else 1.0
        return Observation(others, os.cpu_count() or 1, self.threads, spread)


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds since an arbitrary start: wall time, busy time of all processors, and time of this process on them."""

    wall: float
    all_busy: float
    own: float

    @classmethod
    def now(cls) -> "ProcessorTimes":
        # Time stolen by other guests of a virtual machine counts as busy. Waiting for a disk does not.
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # user and nice include these already
        return cls(time.perf_counter(), sum(times) - guests - idle, time.process_time())

    def others_since(self, earlier: "ProcessorTimes") -> float:
        """The average number of cores that other processes used since an earlier reading."""
        wall = max(self.wall - earlier.wall, 1e-3)
        return max(0.0, (self.all_busy - earlier.all_busy) - (self.own - earlier.own)) / wall


def is_quiet_now(threads: int) -> bool:
    """True if the machine has no other load now, from a short check."""
    began = ProcessorTimes.now()
    time.sleep(GLANCE)
    return not Observation(ProcessorTimes.now().others_since(began), os.cpu_count() or 1, threads).disturbed_by
