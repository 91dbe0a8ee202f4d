"""Disk space as buffers: one unlinked file with a size limit, and extents of exact size in it.

The file never has a name (`O_TMPFILE`; on file systems without that, it is unlinked at once), so the kernel frees its
space when the process ends, however it ends. Space is claimed before anything is written. A full disk is then a refusal
here, and not a signal later. `pwrite` and `pread` copy directly from and into a tensor's memory. The pages of a memory
map would count as memory of this process, which offloading is meant to lower.
"""

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tightfit.errors import LeverError, OutputError
from tightfit.units import format_bytes

SHARE_OF_FREE_SPACE = 0.5  # without a budget; the rest is left for checkpoints and for other programs
PROBE_BYTES = 1 << 26  # many times the size of the processor's caches
_DONTNEED = 4  # MADV_DONTNEED of Linux and of macOS
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritable(path: Path, error: OSError) -> OutputError:
    """The one line for a file or folder of a run that the system does not write."""
    todo = f"{'make room, or ' if error.errno in NO_ROOM else ''}choose another output.folder"
    return OutputError(f"{path}: cannot be written: {error.strerror or error}: {todo}")


def temporary_folder() -> Path:
    """The system's folder for temporary files, or the one that outlives a restart (`/var/tmp`) where the first is in
    memory and nobody named it: what goes to a file is to leave memory.
    """
    folder, lasting = Path(tempfile.gettempdir()), Path("/var/tmp")
    is_named = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    if is_named or not is_in_memory(folder) or is_in_memory(lasting) or not os.access(lasting, os.W_OK):
        return folder
    return lasting


def is_in_memory(folder: Path) -> bool:
    """True if a folder's file system is in memory (Linux; False where nobody says so)."""
    try:
        device = os.stat(folder).st_dev
        mounts = MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():  # proc(5): number, parent, major:minor, ..., a dash, the type
        of_mount, _, of_system = line.partition(" - ")
        if of_mount.split()[2:3] == [wanted] and of_system.split()[:1] in (["tmpfs"], ["ramfs"]):
            return True
    return False


MOUNTS = Path("/proc/self/mountinfo")


class ByteRange(NamedTuple):
    """A range of bytes in the file."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True)
class DiskRates:
    """The rates of copies to a folder and back."""

    write_bytes_per_second: float
    read_bytes_per_second: float


_measured: dict[int, DiskRates] = {}  # by file system


def disk_rates(folder: str | Path | None = None) -> DiskRates:
    """The rates of copies to a folder, measured once for each file system, in a few tenths of a second.

    They are the rates of the system's file cache, which a step sees as long as there is memory for that cache. Writing
    faster than the disk accepts bytes is slower. Raises `OutputError` if no file can be made in the folder.
    """
    store = DiskStore(folder)
    system = os.stat(store.folder).st_dev
    if system not in _measured:
        memory = ctypes.create_string_buffer(PROBE_BYTES)
        address = ctypes.addressof(memory)
        # The first write makes the pages of the file cache, which the reused buffers of a pool have already.
        extent = _probe(store, address)
        start = time.perf_counter()
        store.write(extent, address)
        middle = time.perf_counter()
        store.read(extent, address)
        end = time.perf_counter()
        _measured[system] = DiskRates(PROBE_BYTES / (middle - start), PROBE_BYTES / (end - middle))
    return _measured[system]


def drive_rate(folder: str | Path) -> float:
    """Bytes per second of a read from a folder's drive, past the system's file cache; measured once for each file
    system. Raises `OutputError` if no file can be made in the folder.
    """
    store = DiskStore(folder, user="stream")
    system = os.stat(store.folder).st_dev
    if system not in _drives:
        memory = ctypes.create_string_buffer(PROBE_BYTES)
        address = ctypes.addressof(memory)
        extent = _probe(store, address)
        store.forget(extent)
        start = time.perf_counter()
        store.read(extent, address)
        _drives[system] = PROBE_BYTES / (time.perf_counter() - start)
    return _drives[system]


_drives: dict[int, float] = {}  # by file system


def _probe(store: "DiskStore", address: int) -> ByteRange:
    """The extent that the bytes at an address were written to. Raises `LeverError` where they have no room."""
    extent = store.allocate(PROBE_BYTES)
    if extent is None:
        raise LeverError(f"{store.user}: {store.folder} has no room: name a folder on another disk")
    store.write(extent, address)
    return extent


class DiskStore:
    """Mutable: an unnamed file in `folder`, at most `budget_bytes` long.

    `folder` None is the system's folder for temporary files (`temporary_folder`). `budget_bytes` None is half of the
    free space. `user` is the lever that errors name.
    Raises `OutputError` if no file can be made in the folder, and `LeverError` if the budget exceeds the free space.
    """

    def __init__(self, folder: str | Path | None = None, budget_bytes: int | None = None, *, user: str = "offload"):
        self.user = user
        self.folder = Path(folder) if folder is not None else temporary_folder()
        free_bytes = self._free_bytes()
        if budget_bytes is not None and budget_bytes > free_bytes:
            raise LeverError(
                f"{user}: {format_bytes(budget_bytes)} are more than the {format_bytes(free_bytes)} that are free in "
                f"{self.folder}: lower the budget or name a folder on another disk"
            )
        self.budget_bytes = int(free_bytes * SHARE_OF_FREE_SPACE) if budget_bytes is None else budget_bytes
        self._end = 0
        self._holes: list[ByteRange] = []  # free extents, sorted by start; adjacent ones are merged
        self._left: deque[ByteRange] = deque()  # of maps that are gone; the collector may add one at any moment
        self._fd = self._open()
        self._direct: int | None = None  # the same file, past the cache; -1: the file system has no such way

    @property
    def used_bytes(self) -> int:
        """The length of the file."""
        return self._end

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError as error:
            raise OutputError(
                f"{self.user}: {self.folder} cannot be used: {error.strerror}: name another folder"
            ) from error

    def _open(self) -> int:
        try:
            file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 (open as long as the store lives)
        except OSError as error:
            raise OutputError(
                f"{self.user}: no file can be made in {self.folder}: {error.strerror}: name another folder"
            ) from error
        weakref.finalize(self, file.close)
        return file.fileno()

    # Space

    def allocate(self, nbytes: int) -> ByteRange | None:
        """A new extent with its space on disk claimed; None if the budget is used up or the disk is full."""
        while self._left:
            left = self._left.popleft()
            self.free(left, left.nbytes)
        hole = next((hole for hole in self._holes if hole.nbytes >= nbytes), None)
        if hole is not None:
            place = self._holes.index(hole)
            rest = ByteRange(hole.start + nbytes, hole.nbytes - nbytes)
            self._holes[place : place + 1] = [rest] if rest.nbytes else []
            return ByteRange(hole.start, nbytes)
        if self._end + nbytes > self.budget_bytes or not self._claim(self._end, nbytes):
            return None
        self._end += nbytes
        return ByteRange(self._end - nbytes, nbytes)

    def free(self, buffer: ByteRange, nbytes: int) -> None:
        """Free an extent and merge it with free neighbours. At the end of the file, return its space to the disk."""
        holes = sorted([*self._holes, buffer])
        self._holes = holes[:1]
        for hole in holes[1:]:
            last = self._holes[-1]
            if last.end == hole.start:
                self._holes[-1] = ByteRange(last.start, last.nbytes + hole.nbytes)
            else:
                self._holes.append(hole)
        if self._holes[-1].end == self._end:
            # The budget limits the end of the file, so a free end counts as free again.
            self._end = self._holes.pop().start
            os.ftruncate(self._fd, self._end)

    def _claim(self, start: int, nbytes: int) -> bool:
        try:
            # Not `ftruncate`, which makes a sparse file: the disk could be full later, in the middle of a write.
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            os.ftruncate(self._fd, self._end)  # a failed claim may have extended the file
            return False
        return True

    # Bytes

    def write(self, extent: ByteRange, address: int) -> None:
        """Copy the bytes at a memory address into the extent."""
        source = memoryview(_bytes_at(address, extent.nbytes))
        done = 0
        while done < extent.nbytes:  # one call moves 2 GiB at most
            done += os.pwrite(self._fd, source[done:], extent.start + done)

    def read(self, extent: ByteRange, address: int) -> None:
        """Copy the extent's bytes to a memory address."""
        target = memoryview(_bytes_at(address, extent.nbytes))
        done = 0
        while done < extent.nbytes:
            count = os.preadv(self._fd, [target[done:]], extent.start + done)
            assert count > 0, "an extent lies within the file"
            done += count

    def read_past_cache(self, extent: ByteRange, address: int) -> None:
        """The same, past the system's file cache, to an address with room for whole pages. What is not at the beginning
        of a page, in the file or in memory, goes through the cache.
        """
        if extent.start % mmap.PAGESIZE or address % mmap.PAGESIZE or self._past_cache() < 0:
            self.read(extent, address)
            return
        whole = -(-extent.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        target = memoryview(_bytes_at(address, whole))
        done = 0
        while done < extent.nbytes:
            count = os.preadv(self._past_cache(), [target[done:]], extent.start + done)
            assert count > 0, "an extent lies within the file"
            done += count

    def _past_cache(self) -> int:
        if self._direct is None:
            self._direct = -1
            if hasattr(os, "O_DIRECT"):  # Linux, where an open file has a name of this kind
                with suppress(OSError):  # of a file system in memory
                    self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT)
                    weakref.finalize(self, os.close, self._direct)
        return self._direct

    def read_soon(self, extent: ByteRange) -> None:
        """Have the system read the extent's bytes into its file cache, without waiting for them."""
        if hasattr(os, "posix_fadvise"):  # Linux
            os.posix_fadvise(self._fd, extent.start, extent.nbytes, os.POSIX_FADV_WILLNEED)

    def forget(self, extent: ByteRange) -> None:
        """Have the extent's bytes on the disk, and on Linux not in the file cache."""
        os.fsync(self._fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, extent.start, extent.nbytes, os.POSIX_FADV_DONTNEED)

    def mapped(self, extent: ByteRange) -> ctypes.Array:
        """The extent, which begins at a page, as memory that is the file's own. It outlives this store, and the extent
        is free when nothing holds it any more.
        """
        # Not `mmap.mmap`, which holds a file descriptor: a training has more tensors than a process may open files.
        address = _libc().mmap(None, extent.nbytes, _READ_AND_WRITE, mmap.MAP_SHARED, self._fd, extent.start)
        if address == _FAILED:
            error = ctypes.get_errno()
            raise OutputError(f"{self.user}: a file in {self.folder} cannot be mapped: {os.strerror(error)}")
        pages = _bytes_at(address, extent.nbytes)
        weakref.finalize(pages, _unmapped, address, extent, self._left).atexit = False
        return pages


_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _unmapped(address: int, extent: ByteRange, left: "deque[ByteRange]") -> None:
    _libc().munmap(address, extent.nbytes)
    left.append(extent)


def let_go(address: int, nbytes: int) -> None:
    """Take the pages of a map out of this process's memory. Their content is in the file, and is read again from it."""
    _libc().madvise(address, nbytes, _DONTNEED)


def _bytes_at(address: int, nbytes: int) -> ctypes.Array:
    return (ctypes.c_char * nbytes).from_address(address)
