"""Pinned host memory as buffers of exact size: pages of our own, registered with CUDA as long as the buffer lives.

PyTorch's own pinned memory is rounded up to the next power of two. A buffer also knows the copies that were last
given it, on whatever stream: it must neither be written while one of them reads it nor go while one is under way.
"""

import mmap
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import psutil
import torch

from tightfit.errors import LeverError
from tightfit.runtime.internals import register_pages, unregister_pages
from tightfit.units import format_bytes

SHARE_OF_FREE_MEMORY = 0.5  # without a budget; pinned pages are never swapped out, so the rest must do for everybody


def host_budget(budget_bytes: int | None = None) -> int:
    """The bytes of host memory that may be taken. Raises `LeverError` where the budget is more than what is free."""
    free_bytes = psutil.virtual_memory().available
    if budget_bytes is not None and budget_bytes > free_bytes:
        raise LeverError(
            f"offload: {format_bytes(budget_bytes)} are more than the {format_bytes(free_bytes)} of host memory that "
            "are free: lower the budget"
        )
    return int(free_bytes * SHARE_OF_FREE_MEMORY) if budget_bytes is None else budget_bytes


class Pinning(Protocol):
    """How pages are pinned, and how the host waits for a copy."""

    def register(self, address: int, nbytes: int) -> bool:
        """Whether there was room."""
        ...

    def unregister(self, address: int) -> None: ...

    def finish(self, event: Any) -> None: ...


class CudaPinning:
    """Pages registered with CUDA."""

    def register(self, address: int, nbytes: int) -> bool:
        return register_pages(address, nbytes)

    def unregister(self, address: int) -> None:
        unregister_pages(address)

    def finish(self, event: Any) -> None:
        event.synchronize()


class PinnedBuffer:
    """So many bytes of pinned memory. Mutable: `uses`, the events after the copies last given it, by direction."""

    def __init__(self, pages: mmap.mmap, pinning: Pinning):
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self.uses: dict[str, Any] = {}
        self.release: Callable[[], Any] = weakref.finalize(self, _release, self.bytes.data_ptr(), self.uses, pinning)
        self.release.atexit = False  # pyright: ignore[reportFunctionMemberAccess] (the process takes its pages with it)


def _release(address: int, uses: dict[str, Any], pinning: Pinning) -> None:
    for event in uses.values():
        pinning.finish(event)
    pinning.unregister(address)


class PinnedStore:
    """Mutable: pinned memory of at most `budget_bytes` (None: half of what is free). Raises `LeverError` where the
    budget is more than what is free.
    """

    def __init__(self, budget_bytes: int | None = None, pinning: Pinning | None = None):
        self.budget_bytes = host_budget(budget_bytes)
        self.used_bytes = 0
        self._pinning = pinning or CudaPinning()

    def allocate(self, nbytes: int) -> PinnedBuffer | None:
        """A buffer of so many bytes; None where the budget or the host's memory are full."""
        if self.used_bytes + nbytes > self.budget_bytes:
            return None
        pages = mmap.mmap(-1, nbytes)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        if not self._pinning.register(address, nbytes):
            return None
        self.used_bytes += nbytes
        return PinnedBuffer(pages, self._pinning)

    def free(self, buffer: PinnedBuffer, nbytes: int) -> None:
        """Give a buffer's memory back, when its last copy is complete."""
        buffer.release()
        self.used_bytes -= nbytes
