"""Disk space as buffers: one file without a name, a bound, and extents of exact size within it.

The file has no name from the moment it exists (`O_TMPFILE`; where a file system lacks that, it is unlinked at once), so
the kernel frees its space when the process ends, however it ends. Space is claimed before anything is written: a full
disk is an answer here, not a signal later. Bytes go by `pwrite` and `pread` straight from and into a tensor's memory:
the pages of a mapping would count as memory of this process, which is what offloading is to lower.
"""

import ctypes
import errno
import os
import shutil
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tightfit.errors import LeverError, OutputError
from tightfit.units import format_bytes

SHARE_OF_FREE_SPACE = 0.5  # without a budget; the rest is left to checkpoints and to everybody else
PROBE_BYTES = 1 << 26  # many times the processor's caches
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Extent(NamedTuple):
    """Bytes of the file."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True)
class DiskRates:
    """How fast copies go to a folder and come back."""

    write_bytes_per_second: float
    read_bytes_per_second: float


_measured: dict[int, DiskRates] = {}  # by file system


def disk_rates(folder: str | Path | None = None) -> DiskRates:
    """Measured once for each file system, in some tenths of a second.

    They are those of the system's cache of files, as a step meets them while there is memory for it; a disk that is
    written faster than it takes the bytes is slower. Raises `OutputError` where no file can be made there.
    """
    store = DiskStore(folder)
    system = os.stat(store.folder).st_dev
    if system not in _measured:
        extent = store.allocate(PROBE_BYTES)
        if extent is None:
            raise LeverError(f"offload: {store.folder} has no room: name a folder on another disk")
        memory = ctypes.create_string_buffer(PROBE_BYTES)
        address = ctypes.addressof(memory)
        store.write(extent, address)  # pages of the cache are made at the first write; a pool's buffers have theirs
        start = time.perf_counter()
        store.write(extent, address)
        middle = time.perf_counter()
        store.read(extent, address)
        end = time.perf_counter()
        _measured[system] = DiskRates(PROBE_BYTES / (middle - start), PROBE_BYTES / (end - middle))
    return _measured[system]


class DiskStore:
    """Mutable: an unnamed file in `folder`, at most `budget_bytes` long.

    `folder` None is the system's folder for temporary files (`TMPDIR`); `budget_bytes` None is half of what is free.
    Raises `OutputError` where no file can be made there, `LeverError` where the budget is more than what is free.
    """

    def __init__(self, folder: str | Path | None = None, budget_bytes: int | None = None):
        self.folder = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        free_bytes = self._free_bytes()
        if budget_bytes is not None and budget_bytes > free_bytes:
            raise LeverError(
                f"offload: {format_bytes(budget_bytes)} are more than the {format_bytes(free_bytes)} that are free in "
                f"{self.folder}: lower the budget or name a folder on another disk"
            )
        self.budget_bytes = int(free_bytes * SHARE_OF_FREE_SPACE) if budget_bytes is None else budget_bytes
        self._end = 0
        self._holes: list[Extent] = []  # by their start, never two in a row
        self._fd = self._open()

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError as error:
            raise OutputError(
                f"offload: {self.folder} cannot be used: {error.strerror}: name another folder"
            ) from error

    def _open(self) -> int:
        try:
            file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 (open as long as the store lives)
        except OSError as error:
            raise OutputError(
                f"offload: no file can be made in {self.folder}: {error.strerror}: name another folder"
            ) from error
        weakref.finalize(self, file.close)
        return file.fileno()

    # Space

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent that nobody else has, its space on disk claimed; None where budget or disk are full."""
        hole = next((hole for hole in self._holes if hole.nbytes >= nbytes), None)
        if hole is not None:
            place = self._holes.index(hole)
            rest = Extent(hole.start + nbytes, hole.nbytes - nbytes)
            self._holes[place : place + 1] = [rest] if rest.nbytes else []
            return Extent(hole.start, nbytes)
        if self._end + nbytes > self.budget_bytes or not self._claim(self._end, nbytes):
            return None
        self._end += nbytes
        return Extent(self._end - nbytes, nbytes)

    def free(self, buffer: Extent, nbytes: int) -> None:
        """Take an extent back, joined with free neighbours; at the end of the file its space goes back to the disk."""
        holes = sorted([*self._holes, buffer])
        self._holes = holes[:1]
        for hole in holes[1:]:
            last = self._holes[-1]
            if last.end == hole.start:
                self._holes[-1] = Extent(last.start, last.nbytes + hole.nbytes)
            else:
                self._holes.append(hole)
        if self._holes[-1].end == self._end:
            self._end = self._holes.pop().start
            os.ftruncate(self._fd, self._end)

    def _claim(self, start: int, nbytes: int) -> bool:
        try:
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            os.ftruncate(self._fd, self._end)
            return False
        return True

    # Bytes

    def write(self, extent: Extent, address: int) -> None:
        """Copy the bytes at a memory address into the extent."""
        source = memoryview(_bytes_at(address, extent.nbytes))
        done = 0
        while done < extent.nbytes:  # one call moves 2 GiB at most
            done += os.pwrite(self._fd, source[done:], extent.start + done)

    def read(self, extent: Extent, address: int) -> None:
        """Copy the extent's bytes to a memory address."""
        target = memoryview(_bytes_at(address, extent.nbytes))
        done = 0
        while done < extent.nbytes:
            count = os.preadv(self._fd, [target[done:]], extent.start + done)
            assert count > 0, "an extent lies within the file"
            done += count


def _bytes_at(address: int, nbytes: int) -> ctypes.Array:
    return (ctypes.c_char * nbytes).from_address(address)
