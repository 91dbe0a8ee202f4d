"""Whether the machine had nothing else to do while it was measured: from the processors' clocks, and from a probe."""

import os
import statistics
import time
from dataclasses import dataclass, field

import psutil

from tightfit.devices.timing import Call

# How much others may take before figures suffer: a quarter of a core is what a desktop does when nobody uses it.
TOLERATED_CORES = 0.25
# How much longer than its least a repeated call may take in the median. 1.03 to 1.05 was seen while the other of two
# cores was busy; a call that shares its core takes twice as long. What lies between is assumed.
TOLERATED_SPREAD = 1.15
SAMPLES = 8  # of the probe, each time
GLANCE = 0.2  # seconds


@dataclass(frozen=True)
class Observation:
    """What went on during a measurement: cores that others kept busy, out of how many; cores that the measurement
    itself used; and the probe's median over its least time.
    """

    others: float
    cores: int
    threads: int
    spread: float = 1.0

    @property
    def disturbed_by(self) -> str:
        """What disturbed the measurement, in words; empty where nothing did."""
        causes = []
        if self.others > max(TOLERATED_CORES, self.cores - self.threads):
            causes.append(f"other processes kept {self.others:.1f} of {self.cores} cores busy")
        if self.spread > TOLERATED_SPREAD:
            causes.append(f"a repeated product took {self.spread - 1:.0%} longer than its least")
        return " and ".join(causes)


@dataclass
class LoadObserver:
    """Watches the machine from its making until `observe`; `sample` is called now and then in between."""

    probe: Call
    threads: int
    seconds: list[float] = field(default_factory=list)
    began: "Clocks" = field(default_factory=lambda: Clocks.now())

    def sample(self) -> None:
        """Time the probe a few times."""
        for _ in range(SAMPLES):
            began = time.perf_counter()
            self.probe()
            self.seconds.append(time.perf_counter() - began)

    def observe(self) -> Observation:
        """What went on until now."""
        others = Clocks.now().others_since(self.began)
        spread = statistics.median(self.seconds) / min(self.seconds) if self.seconds else 1.0
        return Observation(others, os.cpu_count() or 1, self.threads, spread)


@dataclass(frozen=True)
class Clocks:
    """Seconds since an arbitrary start: of the wall, of all processors at work, and of this process on them."""

    wall: float
    all_busy: float
    own: float

    @classmethod
    def now(cls) -> "Clocks":
        # Time stolen by other guests of a virtual machine counts as busy, as it should; waiting for a disk does not.
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
        return cls(time.perf_counter(), sum(times) - guests - idle, time.process_time())

    def others_since(self, earlier: "Clocks") -> float:
        """How many cores other processes kept busy on the average."""
        wall = max(self.wall - earlier.wall, 1e-3)
        return max(0.0, (self.all_busy - earlier.all_busy) - (self.own - earlier.own)) / wall


def is_quiet_now(threads: int) -> bool:
    """Whether others leave the machine alone, from a short look."""
    began = Clocks.now()
    time.sleep(GLANCE)
    return not Observation(Clocks.now().others_since(began), os.cpu_count() or 1, threads).disturbed_by
