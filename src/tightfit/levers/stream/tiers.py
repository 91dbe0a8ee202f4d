"""The places of weights that are not on the device: an unnamed file, or for a CUDA device pinned host memory."""

import itertools
import mmap
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from tightfit.errors import LeverError
from tightfit.levers.activity import offload
from tightfit.levers.offload.transfers import IN
from tightfit.levers.recompute.values import Geometry
from tightfit.memory.allocator import elsewhere
from tightfit.memory.disk import ByteRange, DiskStore
from tightfit.memory.pinned import PinnedBuffer, PinnedStore
from tightfit.runtime.streams import CudaStreams
from tightfit.units import format_bytes

STAGES, STAGE_BYTES = 4, 16 << 20  # pinned buffers through which the bytes of a file come to a card


def flat_over(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    """A tensor of all bytes of a storage, which may be empty at present."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))


def in_pages(nbytes: int) -> int:
    """Bytes of the whole pages that hold `nbytes`."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Tier(Protocol):
    """Keeps storages on the host, and fills storages of the device from there."""

    def keep(self, content: torch.UntypedStorage) -> Any:
        """Copy a storage to the host. The result's `bytes` are a flat tensor over the copy."""
        ...

    def bring(self, targets: Sequence[tuple[torch.UntypedStorage, Any]]) -> Any:
        """Begin to fill storages, which get their sizes here. Returns what `arrived` takes."""
        ...

    def arrived(self, arrival: Any) -> None:
        """Make everything computed from here on wait for these copies."""
        ...

    def leaving(self, arrival: Any) -> None:
        """The memory that these copies filled is freed next."""
        ...

    def soon(self, kept: Sequence[Any]) -> None:
        """These bytes are needed soon."""
        ...


class InFile:
    """A storage's bytes in a file, which is mapped: pages that nobody reads take no memory."""

    def __init__(self, extent: ByteRange, bytes_: torch.Tensor):
        self.extent, self.bytes = extent, bytes_


class FileTier:
    """Weights of a CPU's blocks, in an unnamed file in `folder` (None: the folder for temporary files)."""

    def __init__(self, folder: str | Path | None):
        self._store = DiskStore(folder, user="stream")

    def keep(self, content: torch.UntypedStorage) -> InFile:
        count = content.nbytes()
        extent, bytes_ = self._new(count, "weights")
        self._store.write(extent, content.data_ptr())
        return InFile(extent, bytes_)

    def empty(self, shape: torch.Tensor, what: str) -> torch.Tensor:
        """A tensor like one on the meta device, without content, beside the weights."""
        return Geometry.of(shape).over(self._new(shape.untyped_storage().nbytes(), what)[1])

    def _new(self, count: int, what: str) -> tuple[ByteRange, torch.Tensor]:
        extent = self._store.allocate(in_pages(count))
        if extent is None:
            raise LeverError(
                f"stream: {format_bytes(count)} of {what} have no room in {self._store.folder}: free space there, or "
                "name another folder as tier"
            )
        bytes_ = elsewhere(torch.frombuffer(self._store.mapped(extent), dtype=torch.uint8))[:count]
        return ByteRange(extent.start, count), bytes_

    def bring(self, targets: Sequence[tuple[torch.UntypedStorage, Any]]) -> None:
        for storage, kept in targets:
            storage.resize_(kept.extent.nbytes)
            # Not from the map: the pages that are read there would count as memory of this process.
            self._store.read(kept.extent, storage.data_ptr())

    def arrived(self, arrival: None) -> None:
        """Does nothing: a read is complete when `bring` returns."""

    def leaving(self, arrival: None) -> None:
        """Does nothing: no copy is under way."""

    def soon(self, kept: Sequence[Any]) -> None:
        for each in kept:
            self._store.read_soon(each.extent)


class FileToCard(FileTier):
    """Weights of a CUDA device's blocks, in an unnamed file in `folder`.

    A thread reads them into a few pinned buffers, in turns, and begins their copies. So the host's memory has these
    buffers, whatever the weights take, and the computing thread waits for no read that began early enough. What the
    file cache has no room for is read past it: it would be gone from there before it is read again. Weights that are
    `written` go through the cache, since both ways do not mix.
    """

    def __init__(self, folder: str | Path, device: torch.device, *, written: bool):
        super().__init__(folder)
        self._streams = CudaStreams(device)
        self._lane = self._streams.new()
        self._stages: Iterator[PinnedBuffer] | None = None  # made when all weights have left the host's memory
        self._is_cached: bool | None = True if written else None
        self._reader = ThreadPoolExecutor(1, "tightfit-stream")  # one: blocks come in their order
        weakref.finalize(self, self._reader.shutdown, wait=False)

    def keep(self, content: torch.UntypedStorage) -> InFile:
        with offload():
            return super().keep(content if content.device.type == "cpu" else content.cpu())

    def bring(self, targets: Sequence[tuple[torch.UntypedStorage, Any]]) -> Any:
        owner = self._streams.current()  # as in `PinnedTier`
        if self._stages is None:
            self._stages = itertools.cycle(list(_stages(PinnedStore(STAGES * STAGE_BYTES))))
        with offload():
            for storage, kept in targets:
                storage.resize_(kept.extent.nbytes)
        return owner, self._reader.submit(self._copied, list(targets), self._stages, self._streams.mark(owner))

    def _copied(
        self, targets: Sequence[tuple[torch.UntypedStorage, InFile]], stages: Iterator[PinnedBuffer], given: Any
    ) -> Any:
        """In the reading thread: read all, and begin the copies, behind the event after which the memory is theirs."""
        streams = self._streams
        streams.wait(self._lane, given)
        if self._is_cached is None:
            self._is_cached = self._store.used_bytes <= psutil.virtual_memory().available
        read = self._store.read if self._is_cached else self._store.read_past_cache
        for storage, kept in targets:
            flat = flat_over(storage, kept.extent.nbytes)
            for start in range(0, kept.extent.nbytes, STAGE_BYTES):
                count = min(STAGE_BYTES, kept.extent.nbytes - start)
                stage = next(stages)
                if IN in stage.uses:
                    streams.finish(stage.uses[IN])  # the copy of what it held before
                read(ByteRange(kept.extent.start + start, count), stage.bytes.data_ptr())
                streams.copy(self._lane, (flat[start : start + count], stage.bytes[:count]))
                stage.uses[IN] = streams.mark(self._lane)
        return streams.mark(self._lane)

    def arrived(self, arrival: tuple[Any, "Future[Any]"]) -> None:
        owner, read = arrival
        _wait_for(self._streams, owner, read.result())

    def leaving(self, arrival: tuple[Any, "Future[Any]"]) -> None:
        owner, read = arrival
        _leave(self._streams, owner, read.result())


def _stages(pinned: PinnedStore) -> Iterator[PinnedBuffer]:
    for _ in range(STAGES):
        buffer = pinned.allocate(STAGE_BYTES)
        if buffer is None:
            raise LeverError(
                f"stream: {format_bytes(STAGES * STAGE_BYTES)} of pinned buffers have no room in host memory: free some"
            )
        yield buffer


def _wait_for(streams: CudaStreams, owner: Any, event: Any) -> None:
    """Make the stream whose memory was filled, and the computing one, run on after the copies."""
    streams.wait(owner, event)
    current = streams.current()
    if current != owner:
        streams.wait(current, event)


def _leave(streams: CudaStreams, owner: Any, event: Any) -> None:
    """Let the memory be freed: of a block that was fetched and never used, the copy must end before the allocator gives
    its memory away.
    """
    streams.wait(owner, event)
    current = streams.current()
    if current != owner:  # and what the current stream reads of it too
        streams.wait(owner, streams.mark(current))


class PinnedTier:
    """Weights of a CUDA device's blocks, in pinned host memory, which a stream of its own copies."""

    def __init__(self, device: torch.device):
        self._store, self._streams = PinnedStore(), CudaStreams(device)
        self._store.budget_bytes = psutil.virtual_memory().available
        self._lane = self._streams.new()

    def keep(self, content: torch.UntypedStorage) -> Any:
        if content.device.type == "cpu":
            self._store.budget_bytes += content.nbytes()  # the memory in which the weights are now becomes free
        buffer = self._store.allocate(content.nbytes())
        if buffer is None:
            raise LeverError(
                f"stream: {format_bytes(content.nbytes())} of weights have no room in host memory beside "
                f"{format_bytes(self._store.used_bytes)} that are there: free host memory, or stream fewer blocks"
            )
        with offload():
            buffer.storage.copy_(content, non_blocking=False)
        return buffer

    def bring(self, targets: Sequence[tuple[torch.UntypedStorage, Any]]) -> Any:
        streams = self._streams
        owner = streams.current()  # the memory is of the computing stream, as that of offload (`offload/transfers.py`)
        with offload():
            for storage, kept in targets:
                storage.resize_(kept.storage.nbytes())
            # The allocator may have given out memory that kernels queued on the computing stream still use.
            streams.wait(self._lane, streams.mark(owner))
            streams.copy(self._lane, *((storage, kept.storage) for storage, kept in targets))
        event = streams.mark(self._lane)
        for _, kept in targets:
            kept.uses[IN] = event
        return owner, event

    def arrived(self, arrival: Any) -> None:
        _wait_for(self._streams, *arrival)

    def leaving(self, arrival: Any) -> None:
        _leave(self._streams, *arrival)

    def soon(self, kept: Sequence[Any]) -> None:
        """Does nothing: pinned memory is there."""
