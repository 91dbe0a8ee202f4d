"""Reads the counters of the system and of CUDA's allocator, which is cheap enough for several times a step."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes now, and their maximum since the process (or the allocator's record) began. CUDA's are None on a CPU."""

    rss_bytes: int
    rss_highest_bytes: int
    allocated_bytes: int | None = None
    allocated_highest_bytes: int | None = None
    reserved_bytes: int | None = None


def read_counters(device: torch.device) -> Reading:
    """Resident memory of this process, and on CUDA the allocator's counters. Takes some 50 microseconds."""
    rss = this_process().memory_info().rss
    highest = max(rss, highest_rss())
    if device.type != "cuda":
        return Reading(rss, highest)
    stats = torch.cuda.memory_stats(device)
    return Reading(
        rss,
        highest,
        stats.get("allocated_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
        stats.get("reserved_bytes.all.current", 0),
    )


def highest_rss() -> int:
    """The highest resident memory of this process so far, in bytes, as the system counts it (whole pages)."""
    if sys.platform == "win32":
        return this_process().memory_info().peak_wset
    if sys.platform == "linux":
        own = highest_of_own_memory()
        if own is not None:
            return own
    import resource  # absent on Windows

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024  # getrusage(2): kilobytes, on macOS bytes


def highest_of_own_memory() -> int | None:
    """`VmHWM` of Linux; None where the system keeps no such number.

    `ru_maxrss` begins with the peak of the process that started this one: it survives exec, and a fork's memory is its
    parent's until then.
    """
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:
        return None
    found = re.search(rb"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def allocator_state(device: torch.device) -> Mapping[str, int] | None:
    """The figures of CUDA's allocator; None on a CPU.

    The names are those of `torch.cuda.memory_stats`. `inactive_split_bytes` is fragmentation: free bytes that the
    allocator cannot return, because another part of their segment is in use.
    """
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    names = {
        "allocated_bytes": "allocated_bytes.all.current",
        "allocated_peak_bytes": "allocated_bytes.all.peak",
        "reserved_bytes": "reserved_bytes.all.current",
        "reserved_peak_bytes": "reserved_bytes.all.peak",
        "inactive_split_bytes": "inactive_split_bytes.all.current",
        "alloc_retries": "num_alloc_retries",
        "out_of_memory": "num_ooms",
    }
    capacity = torch.cuda.get_device_properties(device).total_memory
    return {"capacity_bytes": capacity} | {name: stats.get(key, 0) for name, key in names.items()}


@cache
def this_process() -> psutil.Process:
    return psutil.Process()
