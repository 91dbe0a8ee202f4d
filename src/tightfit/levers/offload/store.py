"""Stores offloaded values: on disk for a CPU, in pinned host memory for a CUDA device.

A storage is copied as a whole, byte by byte. Views, strides, dtypes of any width and tensors that share a storage then
need no special case: a tensor's geometry applies to the copy as to the original.
"""

import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tightfit.errors import LeverError
from tightfit.levers.activity import offload, simulators
from tightfit.levers.offload.transfers import CudaTransfer, HostTransfer, Lanes, Transfers
from tightfit.levers.recompute.values import Copy
from tightfit.memory.disk import DiskStore
from tightfit.memory.pinned import PinnedStore, host_budget
from tightfit.memory.pool import BufferPool, Lease, PoolStatistics
from tightfit.runtime.internals import counting_alias
from tightfit.runtime.operators import fresh_memory
from tightfit.runtime.simulation import simulation
from tightfit.runtime.streams import CudaStreams
from tightfit.units import format_bytes

DISK, HOST, DRY_DISK, DRY_HOST = "cpu", "cuda", "dry cpu", "dry cuda"  # tiers, by the device that offloads to them
_NAMES = {DISK: "offload to disk", HOST: "offload to host memory"}  # of the pools that a monitor shows
SMALLEST_BYTES = 64 * 1024  # smaller copies take more time than their bytes are worth


@dataclass(frozen=True)
class OffloadSettings:
    """Where values are offloaded to, and how many.

    `folder` is the folder of the file for a CPU's values; None: the system's folder for temporary files. `budget_bytes`
    limits the size of the file, or of host memory for a CUDA device; None: half of what is free. Storages below
    `smallest_bytes` are not offloaded.
    """

    folder: str | Path | None = None
    budget_bytes: int | None = None
    smallest_bytes: int = SMALLEST_BYTES


class OffloadFallback(RuntimeWarning):
    """The offload store had no room for a value, so the value stays in memory."""


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
        """Does nothing: the write to the file was complete when this object was made."""


class DryCopy:
    """A value in a dry run: its bytes in the store's count, and its simulated transfer."""

    __slots__ = ("lease", "transfer")

    def __init__(self, lease: Lease, transfer: HostTransfer):
        self.lease = lease
        self.transfer = transfer

    def fetch(self) -> torch.Tensor:
        return self.transfer.bring()

    def settle(self) -> None:
        """Does nothing: a dry run copies nothing."""


@dataclass
class Accounts:
    """A store that only counts bytes, for dry runs."""

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
class HostStore:
    """Mutable: the pools of one lever, made on first use. A copy or a pickle gets new pools.

    `overtaken` is for dry runs that price blocks. All copies of a block then complete when the block ends, as if other
    blocks that offload followed, and each copy is recorded with its full time.

    Raises `OutputError` if the folder cannot be used, and `LeverError` if the budget exceeds the free memory.
    """

    settings: OffloadSettings = field(default_factory=OffloadSettings)
    overtaken: bool = False

    def __post_init__(self) -> None:
        self._pools: dict[str, BufferPool[Any]] = {}
        self._transfers: dict[Any, Transfers] = {}  # by device; in a dry run there is one
        self._lanes: dict[torch.device, Lanes] = {}
        self._roads: dict[torch.device, tuple[BufferPool[Any], Lanes, Transfers]] = {}  # to host memory
        self._owner = os.getpid()
        self.kept_bytes = 0  # bytes of values that stayed in memory for want of room

    @property
    def smallest_bytes(self) -> int:
        return self.settings.smallest_bytes

    def open(self, tier: str) -> BufferPool[Any]:
        """The pool of a tier."""
        if self._owner != os.getpid():
            # After a fork, parent and child would write into the same places of one file.
            self.__post_init__()
        if tier not in self._pools:
            self._pools[tier] = BufferPool(self.store_of(tier), _NAMES.get(tier))
        return self._pools[tier]

    def store_of(self, tier: str) -> Any:
        """A new store for the buffers of a tier."""
        budget = self.settings.budget_bytes
        if tier == HOST:
            return PinnedStore(budget)
        if tier == DRY_HOST:
            # A machine without a card says nothing about the memory of the card's host, so no limit is assumed.
            return Accounts(sys.maxsize if budget is None and not torch.cuda.is_available() else host_budget(budget))
        disk = DiskStore(self.settings.folder, budget)
        return disk if tier == DISK else Accounts(disk.budget_bytes)

    def begin(self) -> None:
        for transfers in self._transfers.values():
            transfers.begin()

    def end(self) -> None:
        for lanes in self._lanes.values():
            lanes.begin()
        for transfers in self._transfers.values():
            transfers.end()

    def tier_of(self, tensor: torch.Tensor) -> str | None:
        """The tier to which a tensor's value is offloaded; None if its device has none."""
        if simulators.copy is not None:
            return DRY_HOST if simulation.of_cuda else DRY_DISK
        return tensor.device.type if tensor.device.type in (DISK, HOST) else None

    def put(self, tensor: torch.Tensor) -> Copy | None:
        road = self._roads.get(tensor.device) if simulators.copy is None and self._owner == os.getpid() else None
        tier = HOST if road is not None else self.tier_of(tensor)
        if tier is None:
            return None
        pool = self.open(tier) if road is None else road[0]
        lease = pool.lease(tensor.untyped_storage().nbytes())
        if lease is None:
            return self._refuse(tensor, pool, tier)
        if tier == DISK:
            return DiskCopy(lease, pool.store, tensor)
        if simulators.copy is None:
            if road is None:
                device = tensor.device
                road = self._roads[device] = pool, self.lanes_of(device), self._transfers_of(tier, device)
            _, lanes, transfers = road
            # An alias, since the tensor itself would hold the graph that computed it.
            return transfers.send(counting_alias(tensor), CudaTransfer(lanes, lease.buffer, tensor), lease)
        transfer = simulators.copy(tensor, not self.overtaken)
        if tier == DRY_DISK:
            return DryCopy(lease, transfer)  # a write to disk is synchronous, so nothing is in flight
        return self._transfers_of(tier, tensor.device).send(counting_alias(tensor), transfer, lease)

    def _transfers_of(self, tier: str, device: torch.device) -> Transfers:
        found = self._transfers.get((tier, device))
        return found or self._transfers.setdefault((tier, device), Transfers(overtaken=self.overtaken))

    def lanes_of(self, device: torch.device) -> Lanes:
        """The copy streams of a device."""
        if device not in self._lanes:
            self._lanes[device] = Lanes(CudaStreams(device))
        return self._lanes[device]

    def _refuse(self, tensor: torch.Tensor, pool: Any, tier: str) -> None:
        if not self.kept_bytes and simulators.copy is None:  # once: the next values have no room either
            where = "host memory" if tier == HOST else "space in its folder"
            warnings.warn(
                f"offload: there is no room for a value of {format_bytes(tensor.untyped_storage().nbytes())} beside "
                f"{format_bytes(pool.statistics.leased_bytes)} that are offloaded: it stays in memory, and so will "
                f"others (raise the offload budget, or free {where})",
                OffloadFallback,
                stacklevel=2,
            )
        self.kept_bytes += tensor.untyped_storage().nbytes()

    def statistics(self, tier: str = DISK) -> PoolStatistics:
        """Hits, misses and bytes of a tier's pool so far."""
        return self.open(tier).statistics

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.settings = state["settings"]
        self.__post_init__()


def store_with_room(settings: OffloadSettings, needed_bytes: int, *, on_host: bool) -> HostStore:
    """An offload store with room for `needed_bytes` at the same time, in host memory or in a file.

    Raises `LeverError` if there is less room, and `OutputError` if the folder cannot be used.
    """
    offload_store = HostStore(settings)
    store = offload_store.open(HOST if on_host else DISK).store
    if store.budget_bytes < needed_bytes:
        where, other = ("host memory", "budget") if on_host else (f"{store.folder}", "folder or budget")
        raise LeverError(
            f"offload: the plan needs {format_bytes(needed_bytes)} in {where}, and may take "
            f"{format_bytes(store.budget_bytes)}: free space there, or plan again with another {other}"
        )
    return offload_store
