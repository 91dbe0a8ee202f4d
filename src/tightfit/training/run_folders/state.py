"""A check whether a training is writing into a folder now. Finding out disturbs no training that is about to begin."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from tightfit.names import LOCK

LOCKS = Path("/proc/locks")  # Linux, proc_locks(5)
_HELD = (errno.EAGAIN, errno.EACCES)


def holder(folder: Path) -> str | None:
    """The writer ("process 1234 on host"); None where nobody is. A killed training leaves a file that nobody has
    locked.

    The system's list of locks is read first. The lock itself is tried only where that list cannot know: on another
    system, or where the file says that another host wrote it.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        signature = os.pread(descriptor, 256, 0).decode(errors="replace").split("\n")[0] or "a process"
        if _is_listed(os.fstat(descriptor)):
            return signature
        is_ours = signature.endswith(f" on {socket.gethostname()}")
        return None if (is_ours and LOCKS.exists()) or not _is_locked(descriptor) else signature
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_listed(file: os.stat_result) -> bool:
    """True if the system lists a lock of this file, by device and inode."""
    try:
        lines = LOCKS.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return False
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    return any(place in line.split() for line in lines if " FLOCK " in line and "->" not in line)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
