"""Pinned host memory as buffers of exact size: our own pages, registered with CUDA while the buffer exists.

PyTorch rounds its pinned memory up to the next power of two. A buffer also holds the events of its last copies, on any
stream. It must not be written while a copy reads it, and must not be freed while a copy runs.
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

SHARE_OF_FREE_MEMORY = 0.5  # without a budget; pinned pages are never swapped out, and other programs need memory too


def host_budget(budget_bytes: int | None = None) -> int:
    """The bytes of host memory that may be used. Raises `LeverError` if the budget exceeds the free memory."""
    free_bytes = psutil.virtual_memory().available
    if budget_bytes is not None and budget_bytes > free_bytes:
        raise LeverError(
            f"offload: {format_bytes(budget_bytes)} are more than the {format_bytes(free_bytes)} of host memory that "
            "are free: lower the budget"
        )
    return int(free_bytes * SHARE_OF_FREE_MEMORY) if budget_bytes is None else budget_bytes


class Pinning(Protocol):
    """The operations of pinning pages and of waiting for a copy, which tests replace."""

    def register(self, address: int, nbytes: int) -> bool:
        """Pin pages. False if there is no room."""
        ...

    def unregister(self, address: int) -> None: ...

    def finish(self, event: Any) -> None: ...


class CudaPinning:
    """Registers pages with CUDA."""

    def register(self, address: int, nbytes: int) -> bool:
        return register_pages(address, nbytes)

    def unregister(self, address: int) -> None:
        unregister_pages(address)

    def finish(self, event: Any) -> None:
        event.synchronize()


class PinnedBuffer:
    """A buffer of pinned memory. Mutable: `uses`, the events after its last copies, by direction."""

    def __init__(self, pages: mmap.mmap, pinning: Pinning):
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self.storage = self.bytes.untyped_storage()
        self.uses: dict[str, Any] = {}
        self.release: Callable[[], Any] = weakref.finalize(self, _release, self.bytes.data_ptr(), self.uses, pinning)
        self.release.atexit = False  # pyright: ignore[reportFunctionMemberAccess] (the system frees the pages of an ended process)


def _release(address: int, uses: dict[str, Any], pinning: Pinning) -> None:
    # A copy that still runs would read or write freed pages.
    for event in uses.values():
        pinning.finish(event)
    pinning.unregister(address)


class PinnedStore:
    """Mutable: pinned memory of at most `budget_bytes` (None: half of the free memory).

    Raises `LeverError` if the budget exceeds the free memory.
    """

    def __init__(self, budget_bytes: int | None = None, pinning: Pinning | None = None):
        self.budget_bytes = host_budget(budget_bytes)
        self.used_bytes = 0
        self._pinning = pinning or CudaPinning()

    def allocate(self, nbytes: int) -> PinnedBuffer | None:
        """A buffer of `nbytes` bytes; None if the budget is used up or the host has no room."""
        if self.used_bytes + nbytes > self.budget_bytes:
            return None
        pages = mmap.mmap(-1, nbytes)  # not `pin_memory`, which rounds up to a power of two
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        if not self._pinning.register(address, nbytes):
            return None
        self.used_bytes += nbytes
        return PinnedBuffer(pages, self._pinning)

    def free(self, buffer: PinnedBuffer, nbytes: int) -> None:
        """Free a buffer's memory after its last copy is complete."""
        buffer.release()
        self.used_bytes -= nbytes
