"""The system calls that put a run's files on their disk: one seam, so that tests can record them and let them fail.

What POSIX promises is little. The content of a file is on its disk after `sync` of that file. A name that was made,
moved or removed in a folder is so after `sync_folder` of that folder. Without these calls a power cut may leave any of
it done or not done, in any order. What is built on this: `training.checkpoint.store` and `training.storage`.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

_NO_SYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_ONCE_BYTES = 64 << 20  # a signal's handler waits for the end of a call
_AT_THE_END = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class Files:
    """The system calls as they are, and what is put together of them. Each raises `OSError`.

    Tests derive from it and override the first group: the second goes through the first.
    """

    # One system call each

    def create(self, path: Path) -> int:
        """A descriptor of a file that is empty now; a symbolic link is not followed."""
        return os.open(path, _NEW, 0o666)

    def append(self, path: Path) -> int:
        """A descriptor that writes at the end of a file, which need not be there."""
        return os.open(path, _AT_THE_END, 0o666)

    def write(self, descriptor: int, content: memoryview) -> int:
        """Some of the bytes, from the first on; how many."""
        return os.write(descriptor, content)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Until the content of the file is on its disk. After an error nothing is known of that content: the file is
        to be given up, since the system may forget what it could not write (LWN 752063).
        """
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """In one moment; a file of the target's name is replaced, a folder with content is not."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """Until the names in the folder are on its disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC_OF_FOLDERS:  # some network file systems: there names need no sync
                raise
        finally:
            os.close(descriptor)

    # Put together

    def write_all(self, descriptor: int, content: bytes | memoryview) -> None:
        """All of the bytes: one call writes fewer on a disk that is nearly full."""
        left = memoryview(content)
        while left:
            left = left[self.write(descriptor, left[:_AT_ONCE_BYTES]) :]

    def write_file(self, path: Path, content: bytes | memoryview) -> None:
        """A file whose content is on its disk; its name is only after `sync_folder`."""
        descriptor = self.create(path)
        try:
            self.write_all(descriptor, content)
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def sync_file(self, path: Path) -> None:
        """Until the content of a file that somebody else wrote is on its disk."""
        descriptor = self.append(path)
        try:
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def make_folders(self, path: Path) -> bool:
        """A folder with its parents, the names of those that were not there synced; whether this one was not there."""
        if path.is_dir():
            return False
        self.make_folders(path.parent)
        try:
            self.mkdir(path)
        except FileExistsError:
            if not path.is_dir():  # else another process made it meanwhile
                raise
        self.sync_folder(path.parent)
        return True

    def remove(self, path: Path) -> None:
        """A file, a link or a folder with all that is in it."""
        if path.is_symlink() or not path.is_dir():
            self.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            self.remove(entry)
        self.rmdir(path)

    def remove_all(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self.remove(path)


FILES = Files()
