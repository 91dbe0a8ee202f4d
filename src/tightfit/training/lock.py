"""One training a folder: a lock of the operating system, which ends with the process that holds it, however it ends.

`flock` belongs to an opening of the file: a second call in the same process is refused as another process is. Linux
makes it a lock of the server on NFS, so that other hosts see it, unless the mount says `nolock`.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tightfit.errors import OutputError
from tightfit.names import LOCK

_HELD = (errno.EAGAIN, errno.EACCES)  # EACCES: the server's answer on some NFS
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """While it is entered, nobody else can lock the folder; False where its file system knows no locks.

    The lock's file is there as long: one that a killed process left is locked by nobody, and is taken up. Raises
    `OutputError` where somebody else holds the lock, `OSError` where no file can be made.
    """
    path = folder / LOCK
    descriptor = _opened(path)
    try:
        is_locked = _lock(descriptor, path)
        try:
            _sign(descriptor)
            yield is_locked
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file that goes by this name, which may change while one waits for nothing: see `_is_named`."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise OutputError(
                    f"{path.parent}: another training is writing here{_signed(descriptor)}: choose another "
                    "output.folder, or wait for its end"
                ) from None
            if error.errno in _NO_LOCKS:
                return False
            raise
        if _is_named(descriptor, path):
            return True
        # Whoever held it removed the file between our opening and our lock: what is locked is nobody's any more.
        fresh = _opened(path)
        os.dup2(fresh, descriptor, inheritable=False)
        os.close(fresh)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """The holder of the lock, for the message to those who are refused."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _signed(descriptor: int) -> str:
    signature = os.pread(descriptor, 256, 0).decode(errors="replace")
    return f" ({signature})" if signature else ""
