"""Counts the bytes of live storages, operator by operator."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tightfit.runtime.simulation import simulation
from tightfit.tracing.record import Category, StorageRecord, ValueRecord


class Cell:
    """A record attached to a storage. It holds the state of the storage's content, and notifies the ledger when the
    storage is freed.
    """

    __slots__ = ("category", "drawn", "everywhere", "index", "known", "ledger", "value")

    def __init__(self, ledger: "Ledger", index: int, known: bool):
        self.index = index
        self.ledger = ledger  # set after the index, because `__del__` releases a cell that has a ledger
        self.known = known  # whether the memory holds real data
        self.value = -1  # the value it holds now
        self.everywhere: bool | None = None  # what unknown data is anyway, in all places (`tracing.finite`)
        self.drawn = False  # whether known data was drawn at random, or computed from such numbers

    def __del__(self) -> None:
        # An interrupt in `__init__` (Ctrl-C) leaves a cell without a ledger, and with nothing to release.
        if (ledger := getattr(self, "ledger", None)) is not None:
            ledger.release(self.index)


@dataclass(slots=True)
class Entry:
    """The mutable state of a storage, from which its `StorageRecord` is made."""

    bytes: int
    operator: int | None
    born: int
    forward: bool  # allocated in forward or in recomputation
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    name: str = ""
    category: Category | None = None
    died: int | None = None
    stream: int = 0
    host_bytes: int = 0  # in the host's memory, while a card's is counted
    is_pinned: bool = False


@dataclass(slots=True)
class ValueEntry:
    storage: int
    operator: int | None
    saved: bool = False


@dataclass(slots=True)
class Ledger:
    """Mutable: the storages of one traced step, live and freed."""

    entries: list[Entry] = field(default_factory=list)
    values: list[ValueEntry] = field(default_factory=list)
    live_bytes: int = 0
    now: int = 0  # the operator that is running
    rounding: int = 1  # the allocator rounds sizes up to multiples of this
    holders: list[Any] = field(default_factory=list)  # storages with a cell that outlive the trace
    streams: list[Any] = field(default_factory=lambda: [torch.cpu.current_stream()])  # the computing one first
    closed: bool = False
    key: str = "_tightfit_dry"  # the attribute of storages that holds the cell

    def cell_of(self, tensor: torch.Tensor) -> Cell | None:
        """The cell that this ledger attached to the tensor's storage, if any."""
        cell = tensor.untyped_storage().__dict__.get(self.key)
        return cell if cell is not None and cell.ledger is self else None

    def track(self, tensor: torch.Tensor, *, known: bool, operator: int | None, forward: bool = False) -> Cell:
        """The cell of the tensor's storage, made if there is none."""
        storage = tensor.untyped_storage()
        cell = self.cell_of(tensor)
        if cell is None:
            on_host = _on_host()
            nbytes = 0 if tensor._is_zerotensor() else storage.nbytes()  # zeros of forward-mode differentiation
            size = 0 if on_host or simulation.in_file else -(-nbytes // self.rounding) * self.rounding
            cell = storage.__dict__[self.key] = Cell(self, len(self.entries), known)
            entry = Entry(size, operator, self.now, forward, tensor.shape, tensor.dtype, stream=self._stream())
            if on_host:
                entry.host_bytes, entry.is_pinned = nbytes, simulation.pinned
            self.entries.append(entry)
            self.live_bytes += size
            self.new_value(cell, operator)
        return cell

    def track_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Track tensors without known data that may be freed before the step begins."""
        for tensor in tensors:
            self.track(tensor, known=False, operator=None)

    def announce(self, tensor: torch.Tensor, category: Category, *, known: bool, name: str = "") -> None:
        """Enter a tensor that exists before the step begins and after it ends."""
        self.track(tensor, known=known, operator=None)
        self.holders.append(tensor.untyped_storage())
        self.label(tensor, category, name)

    def new_value(self, cell: Cell, operator: int | None) -> int:
        """Register a new content of the storage, and return its index."""
        cell.value = len(self.values)
        self.values.append(ValueEntry(cell.index, operator))
        return cell.value

    def release(self, index: int) -> None:
        """Note that a storage was freed."""
        if not self.closed:  # storages of the user's may be freed long after the trace
            entry = self.entries[index]
            entry.died = self.now + 1
            self.live_bytes -= entry.bytes

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> bool:
        """Enter a new size of a storage, as its release and a new allocation. False if no cell of this ledger is on it.

        FSDP2 frees gathered parameters by the size zero, because views of them are saved for backward, and gives them
        their size back. So a storage that changes its size holds a parameter, unless it is known to hold another thing.
        """
        cell: Cell | None = storage.__dict__.get(self.key)
        if cell is None or cell.ledger is not self:
            return False
        self.release(cell.index)
        before = self.entries[cell.index]
        size = -(-nbytes // self.rounding) * self.rounding
        cell.index = len(self.entries)
        kept = before.shape, before.dtype, before.name, before.category or Category.PARAMETER
        self.entries.append(Entry(size, self.now, self.now, before.forward, *kept, stream=self._stream()))
        self.live_bytes += size
        self.new_value(cell, self.now)
        return True

    def _stream(self) -> int:
        """The number of the current stream. FSDP2 asks a CPU for streams too, which do nothing but be current."""
        current = torch.cpu.current_stream()
        if current is self.streams[0]:
            return 0
        if current not in self.streams:
            self.streams.append(current)
        return self.streams.index(current)

    def label(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Set the category and the name of a storage, unless it has a category."""
        cell = self.cell_of(tensor)
        if cell is not None and self.entries[cell.index].category is None:
            self.entries[cell.index].category = category
            self.entries[cell.index].name = name

    def on_host(self, tensor: torch.Tensor) -> None:
        """Count a tensor among the host's memory, while the device's memory is counted."""
        cell = self.cell_of(tensor)
        if cell is not None:
            entry = self.entries[cell.index]
            self.live_bytes -= entry.bytes
            entry.bytes, entry.host_bytes = 0, tensor.untyped_storage().nbytes()

    def reserve(self, size: int, category: Category, name: str = "") -> None:
        """Count memory that is held during the whole step, without a tensor."""
        self.entries.append(Entry(size, None, 0, False, name=name, category=category))
        self.live_bytes += size

    def reserve_on_host(self, nbytes: int, category: Category, name: str = "") -> None:
        """Count memory of the host that is held during the whole step, while the device's memory is counted."""
        self.entries.append(Entry(0, None, 0, False, name=name, category=category, host_bytes=nbytes))

    def begin_again(self) -> None:
        """Start the record here. Storages that are alive now count as existing before the step."""
        self.now = 0
        for entry in self.entries:
            entry.born = 0
            if entry.died is None:
                entry.operator = None
            else:
                entry.died = 0

    def has_left(self) -> bool:
        """True if a storage that was allocated since the record began is still alive, and is no gradient."""
        return any(
            entry.died is None and entry.operator is not None and entry.category is not Category.GRADIENT
            for entry in self.entries
        )

    def close(self) -> None:
        """Remove the cells from the storages that outlive the trace."""
        self.closed = True
        for storage in self.holders:
            self.take_off(storage)
        self.holders.clear()

    def take_off(self, storage: torch.UntypedStorage) -> None:
        """Remove this ledger's cell from a storage."""
        storage.__dict__.pop(self.key, None)

    def storage_records(self, backward_start: int) -> tuple[StorageRecord, ...]:
        """The records of all storages. `backward_start` is the first backward operator."""
        return tuple(
            StorageRecord(
                entry.bytes,
                entry.category or self._guess(entry, backward_start),
                entry.operator,
                entry.born,
                entry.died,
                entry.shape,
                str(entry.dtype).removeprefix("torch.") if entry.dtype is not None else "",
                entry.name,
                entry.stream,
                entry.host_bytes,
                entry.is_pinned,
            )
            for entry in self.entries
        )

    @staticmethod
    def _guess(entry: Entry, backward_start: int) -> Category:
        # Allocated in forward (or recomputation) and still held in backward: an activation. Else scratch memory.
        outlives = entry.died is None or entry.died > max(backward_start, entry.born + 1)
        return Category.ACTIVATION if entry.forward and outlives else Category.WORKSPACE

    def value_records(self) -> tuple[ValueRecord, ...]:
        return tuple(ValueRecord(v.storage, v.operator, v.saved) for v in self.values)


def _on_host() -> bool:
    """True if a tensor made now is in host memory while a device's memory is counted."""
    return simulation.host > 0 and simulation.of_cuda
