"""Where offloaded values lie: for a CPU, on disk.

A storage is copied whole, byte by byte, so that views, strides, dtypes of any width and tensors that share it need no
thought: geometry is laid over the copy as it was over the original.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tightfit.activity import now, offload
from tightfit.levers.recompute.values import Copy
from tightfit.memory.disk import DiskStore
from tightfit.memory.pool import BufferPool, Lease, PoolStatistics
from tightfit.operators import fresh_memory
from tightfit.units import format_bytes

_NAMES = {"cpu": "offload to disk"}  # of the pools that a monitor shows
SMALLEST_BYTES = 64 * 1024  # below, a copy's own overhead is more than what the bytes are worth


@dataclass(frozen=True)
class OffloadSettings:
    """Where offloaded values go and how many.

    `folder` holds the file for a CPU's values, None: the system's folder for temporary files. `budget_bytes` bounds its
    size, None: half of what is free. Storages below `smallest_bytes` stay where they are.
    """

    folder: str | Path | None = None
    budget_bytes: int | None = None
    smallest_bytes: int = SMALLEST_BYTES


class OffloadFallback(RuntimeWarning):
    """There was no room for a value on the shelf: it stays in memory."""


class DiskCopy:
    """A storage's bytes in the file."""

    __slots__ = ("device", "dtype", "lease", "store")

    def __init__(self, lease: Lease, store: DiskStore, tensor: torch.Tensor):
        self.lease = lease
        self.store = store
        self.dtype, self.device = tensor.dtype, tensor.device
        self.store.write(lease.buffer, tensor.untyped_storage().data_ptr())

    def fetch(self) -> torch.Tensor:
        with offload():
            content = fresh_memory(self.lease.nbytes, self.dtype, self.device)
        self.store.read(self.lease.buffer, content.untyped_storage().data_ptr())
        return content

    def settle(self) -> None:
        """Writing to the file is complete when `DiskCopy` is made."""


class DryCopy:
    """In a dry run: room on the shelf, and what the trace makes of the rest."""

    __slots__ = ("bring_back", "lease")

    def __init__(self, lease: Lease, bring_back: Callable[[], torch.Tensor]):
        self.lease = lease
        self.bring_back = bring_back

    def fetch(self) -> torch.Tensor:
        return self.bring_back()

    def settle(self) -> None:
        """Nothing was copied."""


@dataclass
class Accounts:
    """A store that only counts: the shelf of a dry run."""

    budget_bytes: int
    used_bytes: int = 0

    def allocate(self, nbytes: int) -> int | None:
        if self.used_bytes + nbytes > self.budget_bytes:
            return None
        self.used_bytes += nbytes
        return nbytes

    def free(self, buffer: int, nbytes: int) -> None:
        self.used_bytes -= nbytes


@dataclass
class HostShelf:
    """Mutable: the pools of one lever, made when they are first needed. A copy or a pickle has pools of its own.

    Raises `OutputError` where the folder cannot be used, `LeverError` where the budget is more than what is free.
    """

    settings: OffloadSettings = field(default_factory=OffloadSettings)

    def __post_init__(self) -> None:
        self._pools: dict[str, BufferPool[Any]] = {}
        self._owner = os.getpid()
        self.kept_bytes = 0  # of values for which there was no room

    @property
    def smallest_bytes(self) -> int:
        return self.settings.smallest_bytes

    def open(self, kind: str) -> BufferPool[Any]:
        """The pool for tensors of a kind of device, `"cpu"`; for a dry run, `"dry"`."""
        if self._owner != os.getpid():
            self.__post_init__()  # a fork: parent and child would write into the same places of one file
        if kind not in self._pools:
            self._pools[kind] = BufferPool(self._store(kind), _NAMES.get(kind))
        return self._pools[kind]

    def _store(self, kind: str) -> Any:
        disk = DiskStore(self.settings.folder, self.settings.budget_bytes)
        return Accounts(disk.budget_bytes) if kind == "dry" else disk

    def put(self, tensor: torch.Tensor) -> Copy | None:
        kind = "dry" if now.dry_copy is not None else tensor.device.type
        if kind not in ("cpu", "dry"):
            return None
        pool = self.open(kind)
        lease = pool.lease(tensor.untyped_storage().nbytes())
        if lease is None:
            return self._refuse(tensor, pool)
        if now.dry_copy is not None:
            return DryCopy(lease, now.dry_copy(tensor))
        return DiskCopy(lease, pool.store, tensor)

    def _refuse(self, tensor: torch.Tensor, pool: Any) -> None:
        if not self.kept_bytes and now.dry_copy is None:
            warnings.warn(
                f"offload: there is no room for a value of {format_bytes(tensor.untyped_storage().nbytes())} beside "
                f"{format_bytes(pool.statistics.leased_bytes)} that are offloaded: it stays in memory, and so will "
                "others (raise the offload budget, or free space in its folder)",
                OffloadFallback,
                stacklevel=2,
            )
        self.kept_bytes += tensor.untyped_storage().nbytes()

    def statistics(self, kind: str = "cpu") -> PoolStatistics:
        """What the pool for a kind of device has done so far."""
        return self.open(kind).statistics

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.settings = state["settings"]
        self.__post_init__()
