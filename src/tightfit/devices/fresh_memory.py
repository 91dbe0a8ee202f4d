"""Measures the cost of memory that the allocator gets new from the system each time."""

import itertools
import sys
from collections.abc import Sequence

import torch

from tightfit.devices.timing import fastest

SIZES = tuple(2**power for power in range(20, 28))  # 1 MiB to 128 MiB
SECONDS = 0.1  # for each size: the first rounds also wait for a hypervisor to find pages
ROUNDS = 10


def fresh_memory(sizes: Sequence[int] = SIZES) -> tuple[int | None, float]:
    """The size from which on buffers come new from the system each time, and the seconds per byte that this costs.

    C libraries return large blocks to the system when they are freed (glibc: from 32 MiB on, once a program has run for
    a while). The next owner then pays for a page fault every 4 KiB. The threshold is the smallest size whose buffers
    fault again right after a buffer of that size was freed. The result is (None, 0) if no size does, and on Windows,
    which does not count faults in this way. Sizes are tried in rising order, as a growing program requests them.
    """
    if sys.platform == "win32":
        return None, 0.0
    faulting = {size: _faults(size) for size in sizes}
    above = list(itertools.takewhile(faulting.__getitem__, reversed(sizes)))
    if not above:
        return None, 0.0
    return above[-1], min(_extra_seconds(size) / size for size in above)


def _faults(size: int) -> bool:
    """True if most pages of a buffer fault although buffers of the same size were freed just before."""
    import resource

    _fill(size)  # lets glibc raise its threshold to this size
    _fill(size)  # lets the heap grow to it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _fill(size)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults > size / resource.getpagesize() / 2


def _fill(size: int) -> None:
    torch.empty(size, dtype=torch.uint8).fill_(1)


def _extra_seconds(size: int) -> float:
    """Seconds to fill and free a new buffer, in addition to filling an existing one."""
    used = torch.empty(size, dtype=torch.uint8)
    spent = fastest({"fresh": lambda: _fill(size), "used": lambda: used.fill_(1)}, "cpu", SECONDS, ROUNDS)
    return max(0.0, spent["fresh"] - spent["used"])
