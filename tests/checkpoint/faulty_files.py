"""System calls that are recorded, and calls that fail."""

import errno
from pathlib import Path
from typing import NamedTuple

from tightfit.training.checkpoint.files import Files


class Call(NamedTuple):
    """One system call on files, by paths relative to a root. `number` tells files apart that had the same name."""

    kind: str
    path: str
    target: str = ""
    content: bytes = b""
    number: int = 0


class Recorder(Files):
    """Does every call, and keeps a list of them; `marks` says what is done after how many of them."""

    def __init__(self, root: Path):
        self.root = root
        self.calls: list[Call] = []
        self.marks: list[tuple[int, int]] = []
        self._opened: dict[int, tuple[str, int]] = {}
        self._files = 0

    def mark(self, what: int) -> None:
        self.marks.append((len(self.calls), what))

    def _did(self, kind: str, path: Path, target: Path | None = None) -> None:
        self.calls.append(Call(kind, self._name(path), self._name(target) if target else ""))

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _on(self, kind: str, descriptor: int, content: bytes = b"") -> None:
        path, number = self._opened[descriptor]
        self.calls.append(Call(kind, path, content=content, number=number))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._files += 1
        self._opened[descriptor] = (self._name(path), self._files)
        self._on("create", descriptor)
        return descriptor

    def append(self, path: Path) -> int:
        is_new = not path.exists()
        descriptor = super().append(path)
        self._files += 1
        self._opened[descriptor] = (self._name(path), self._files)
        self._on("create" if is_new else "open", descriptor)
        return descriptor

    def write(self, descriptor: int, content: memoryview) -> int:
        count = super().write(descriptor, content)
        self._on("write", descriptor, bytes(content[:count]))
        return count

    def truncate(self, descriptor: int, size: int) -> None:
        raise AssertionError("nothing here is cut")

    def sync(self, descriptor: int) -> None:
        self._on("sync", descriptor)  # the test itself needs no disk

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        del self._opened[descriptor]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._did("rename", source, target)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._did("unlink", path)

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._did("mkdir", path)

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self._did("unlink", path)

    def sync_folder(self, path: Path) -> None:
        self._did("sync_folder", path)


class Failing(Files):
    """The call with a number fails, and with `stays` every later one that may fail for the same reason too.

    A disk without room takes a part of what is written; nothing that gives room fails on it.
    """

    def __init__(self, at: int, code: int, stays: bool = False):
        self.calls = 0
        self.has_failed = False
        self._at, self._code, self._stays = at, code, stays

    def _count(self, needs_room: bool = True) -> None:
        self.calls += 1
        is_due = self.calls - 1 == self._at or (self._stays and self.calls - 1 > self._at)
        if is_due and (needs_room or self._code != errno.ENOSPC):
            self.has_failed = True
            raise OSError(self._code, errno.errorcode[self._code])

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def append(self, path: Path) -> int:
        self._count()
        return super().append(path)

    def write(self, descriptor: int, content: memoryview) -> int:
        try:
            self._count()
        except OSError:
            super().write(descriptor, content[: len(content) // 2])
            raise
        return super().write(descriptor, content)

    def sync(self, descriptor: int) -> None:
        self._count()

    def close(self, descriptor: int) -> None:
        super().close(descriptor)  # the descriptor is gone, whatever the system says about it
        self._count()

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count(needs_room=False)
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)

    def rmdir(self, path: Path) -> None:
        self._count(needs_room=False)
        super().rmdir(path)

    def sync_folder(self, path: Path) -> None:
        self._count()
