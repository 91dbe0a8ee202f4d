"""The checkpoints of one run: saved in one transaction each, found again, and the old ones removed."""

import errno
import fcntl
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tightfit.errors import OutputError
from tightfit.memory.disk import unwritable
from tightfit.training.checkpoint import find, reading
from tightfit.training.checkpoint import record as records
from tightfit.training.checkpoint.files import FILES, Files
from tightfit.training.checkpoint.find import ListedCheckpoint, NewestCheckpoint
from tightfit.training.checkpoint.manifest import (
    MANIFEST,
    MAX_STEP,
    TENSORS,
    Content,
    Manifest,
    TensorsFile,
    check_file_bytes,
    check_file_name,
)
from tightfit.training.checkpoint.names import PART, is_old, name_of, old_name, part_name, step_of
from tightfit.training.checkpoint.tensors import file_bytes, write_tensors
from tightfit.units import format_bytes

WAIT_SECONDS = 60.0  # for another process that saves in the same folder
_POLL_SECONDS = 0.05
_HELD = (errno.EAGAIN, errno.EACCES)  # EACCES: the server's answer on some NFS


class OtherWriters(Protocol):
    """Further processes that write their shards of the tensors into a checkpoint that this one saves."""

    @property
    def count(self) -> int: ...

    def begin(self, part: Path) -> None:
        """They may write into this folder."""
        ...

    def written(self) -> tuple[TensorsFile, ...]:
        """Their files, when all of them are on their disk. Raises `OutputError` where one is not."""
        ...


class Checkpoints:
    """Mutable: the folder of a run's checkpoints. It is made by the first save.

    Every error is one line: `OutputError` where something cannot be written, `CheckpointError` where it cannot be read.
    Two processes may save into one folder: one waits for the other.
    """

    def __init__(self, folder: str | Path, files: Files = FILES):
        self.folder = Path(folder)
        self._files = files
        self._has_name = False  # whether the folder's name is on its disk
        self._saved: int | None = None  # the last step that was saved here, and so is intact

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        others: OtherWriters | None = None,
    ) -> Path:
        """A new checkpoint, on its disk when this returns; its folder.

        Whatever ends it, a power cut too, every checkpoint that was intact before is intact afterwards, or the new one
        is in its place: one of the same step is replaced. `record` is any JSON (`training.checkpoint.record`). `files`
        are further files by name. `others` write the further rows of tensors. Raises `OutputError`.
        """
        assert 0 <= step < MAX_STEP, step
        target = self.folder / name_of(step)
        with self._writing(target):
            records.encoded(record)  # what is no JSON is said before anything is written
            self._make_folder()
            with _alone(self.folder):
                self._tidy()
                writers = 1 + (0 if others is None else others.count)  # the others' shards are not larger
                self._demand_room(writers * file_bytes(tensors) + sum(map(len, (files or {}).values())))
                part = self.folder / part_name(target.name)
                try:
                    self._write(part, step, tensors, record, files or {}, others)
                    self._put(part, target)
                except BaseException:
                    with suppress(OSError):  # the first error is the one to know; the next save removes what is left
                        self._files.remove(part)
                    raise
                self._files.sync_folder(self.folder)
                self._saved = step
                self._remove_old()
        return target

    def newest_intact(self) -> NewestCheckpoint:
        """The newest checkpoint whose every byte is as it was written, and one line for each newer one that is not.

        Raises `CheckpointError` where the folder is there and cannot be read.
        """
        return find.newest_intact(self.folder)

    def listed(self) -> tuple[ListedCheckpoint, ...]:
        """All checkpoints by step, without reading their tensors. Raises `CheckpointError` like `newest_intact`."""
        return find.listed(self.folder)

    def prune(
        self, keep_last: int, keep_best: int = 0, *, metric: str = "validation_loss", lower_is_better: bool = True
    ) -> tuple[Path, ...]:
        """Remove older checkpoints but for the last and the best ones, and what killed runs left; those that were
        removed.

        The best have the lowest (or highest) `record[metric]`; those whose record has no such number are not among
        them. The newest intact one always stays, and so does anything newer. Raises `OutputError`.
        """
        assert keep_last >= 1, keep_last
        with self._writing(self.folder):
            if not self.folder.is_dir():
                return ()
            with _alone(self.folder):
                self._tidy()
                entries = self.listed()
                newest = self._newest_step(entries)
                whole = [entry for entry in entries if entry.checkpoint is not None and entry.step <= newest]
                kept = {entry.path for entry in whole[-keep_last:]}
                scored = [(score, entry) for entry in whole if (score := _score(entry, metric)) is not None]
                scored.sort(key=lambda pair: (pair[0] if lower_is_better else -pair[0], -pair[1].step))
                kept |= {entry.path for _, entry in scored[:keep_best]}
                removed = [entry.path for entry in entries if entry.step < newest and entry.path not in kept]
                self._remove(removed)
                return tuple(removed)

    def _newest_step(self, entries: tuple[ListedCheckpoint, ...]) -> int:
        """The step of the newest intact one; -1 where there is none, so that nothing is older."""
        if self._saved is not None and any(entry.step == self._saved and entry.checkpoint for entry in entries):
            return self._saved
        found = self.newest_intact().checkpoint
        return -1 if found is None else found.step

    def _make_folder(self) -> None:
        """With its name on the disk: a run that made it may have been killed before."""
        if not self._files.make_folders(self.folder) and not self._has_name:
            self._files.sync_folder(self.folder.parent)
        self._has_name = True

    def _demand_room(self, needed_bytes: int) -> None:
        """Raises `OutputError` rather than fill the disk on which others write too."""
        usage = shutil.disk_usage(self.folder)
        if usage.total and usage.free < needed_bytes:  # some network file systems do not know
            raise OutputError(
                f"{self.folder}: {format_bytes(usage.free)} are free, and a checkpoint takes "
                f"{format_bytes(needed_bytes)}: make room, or choose another output.folder"
            )

    def _write(
        self,
        part: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        files: Mapping[str, bytes],
        others: OtherWriters | None,
    ) -> None:
        """All files of a checkpoint in a folder of their own, the manifest last, on their disk but for its name."""
        self._files.mkdir(part)
        if others is not None:
            others.begin(part)
        contents = {}
        for name, content in files.items():
            self._files.write_file(part / check_file_name(name), content)
            contents[name] = Content(check_file_bytes(len(content)), reading.digest_of(content))
        written = write_tensors(self._files, part / TENSORS, tensors)
        shards = () if others is None else others.written()
        self._files.write_file(part / MANIFEST, Manifest(step, written, contents, record, shards).to_bytes())
        self._files.sync_folder(part)

    def _put(self, part: Path, target: Path) -> None:
        """Give a complete checkpoint its name. One that has it is renamed first, and found under that name too."""
        if not os.path.lexists(target):
            self._files.rename(part, target)
            return
        step = step_of(target.name)
        assert step is not None, "a checkpoint goes by its step"
        old = self.folder / old_name(step)
        self._files.rename(target, old)
        try:
            self._files.rename(part, target)
        except BaseException:
            with suppress(OSError):  # under the old one's other name it is as good
                self._files.rename(old, target)
            raise

    def _tidy(self) -> None:
        """Remove what killed runs were writing or removing, and give a checkpoint back its name."""
        for path in sorted(self.folder.glob(f"{PART}*")):
            self._files.remove(path)
        for path in find.checkpoint_paths(self.folder):
            step = step_of(path.name)
            if step is not None and is_old(path.name) and not os.path.lexists(self.folder / name_of(step)):
                self._files.rename(path, self.folder / name_of(step))
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove checkpoints in whose place there is a new one of the same step."""
        self._remove([path for path in find.checkpoint_paths(self.folder) if is_old(path.name)])

    def _remove(self, paths: list[Path]) -> None:
        """Under another name first, and that on its disk: whatever a power cut leaves is whole or nobody's."""
        parts = [self.folder / part_name(path.name.lstrip(".")) for path in paths]
        for path, part in zip(paths, parts, strict=True):
            self._files.rename(path, part)
        if parts:
            self._files.sync_folder(self.folder)
        for part in parts:
            self._files.remove(part)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(path, error) from error
        except ValueError as error:  # a record that is no JSON, a file's name
            raise OutputError(f"{path}: cannot be written: {error}") from error


def _score(entry: ListedCheckpoint, metric: str) -> float | None:
    score = entry.checkpoint.record.get(metric) if entry.checkpoint else None
    if not isinstance(score, int | float) or isinstance(score, bool) or math.isnan(score):
        return None
    return score


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While it is entered, nobody else saves or prunes in the folder, unless its file system knows no locks.

    The lock is the operating system's, on the folder itself: it ends with the process, and leaves no file. Raises
    `OutputError` where somebody holds it for long.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _HELD:
                    break  # the file system has no locks: `tightfit train` has said so at its start
            if time.monotonic() > until:
                raise OutputError(
                    f"{folder}: another process has been saving there for {WAIT_SECONDS:.0f} seconds: end it, or "
                    "choose another output.folder"
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
