"""Files of a checkpoint, opened and read with care: somebody else may have put anything in their place."""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHUNK_BYTES = 1 << 20  # the hash lets other threads run while it takes this much
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def opened(folder: Path, name: str) -> Iterator[int]:
    """A descriptor of the file of that name in a folder.

    Raises `ValueError` where it is no file, a symbolic link included, and nothing waits: the other end of a pipe may
    never come. Raises `OSError` where it cannot be opened.
    """
    parent = os.open(folder, _READ | os.O_DIRECTORY)
    try:
        _demand_file(os.stat(name, dir_fd=parent, follow_symlinks=False))  # before it: opening alone moves some devices
        descriptor = os.open(name, _READ, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        _demand_file(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def size_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def read_into(descriptor: int, start: int, target: memoryview) -> None:
    """Bytes of the file from `start` on, as many as the target has. Raises `ValueError` where the file ends before."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], start + done)
        if count == 0:
            raise ValueError("ends too early")
        done += count


def read_bytes(descriptor: int, start: int, count: int) -> bytes:
    content = bytearray(count)
    read_into(descriptor, start, memoryview(content))
    return bytes(content)


def read_small(folder: Path, name: str, limit_bytes: int) -> bytes:
    """A whole file. Raises `ValueError` where it is longer than the limit, and like `opened`."""
    with opened(folder, name) as descriptor:
        size = size_of(descriptor)
        if size > limit_bytes:
            raise ValueError(f"is {size:,} bytes long, more than {limit_bytes:,}")
        return read_bytes(descriptor, 0, size)


def new_digest() -> "hashlib.blake2b":
    """BLAKE2b with 256 bits (RFC 7693), as `b2sum -l 256` has it.

    On a processor without instructions for SHA it takes two thirds of the time of SHA-256 (notes/).
    """
    return hashlib.blake2b(digest_size=32)


def digest_of(content: bytes | memoryview) -> str:
    digest = new_digest()
    digest.update(content)
    return digest.hexdigest()


def digest_of_range(descriptor: int, start: int, count: int) -> str:
    """The hash of some of the file's bytes, through a buffer of one chunk. Raises `ValueError` where it ends before."""
    digest = new_digest()
    buffer = memoryview(bytearray(min(count, CHUNK_BYTES)))
    for at in range(start, start + count, CHUNK_BYTES):
        part = buffer[: start + count - at]
        read_into(descriptor, at, part)
        digest.update(part)
    return digest.hexdigest()


def _demand_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a plain file")
