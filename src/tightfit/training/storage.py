"""The run's folder: the only file that writes what a training leaves on disk.

A file is written under a temporary name, synced, renamed, and its name synced: a reader sees a whole file or none,
after a power cut too. Only metrics.jsonl grows, a whole line at a time.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch import nn

from tightfit.errors import OutputError
from tightfit.memory.disk import unwritable
from tightfit.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tightfit.models.saving import CONFIG_FILE, WEIGHTS_FILE, save_model
from tightfit.names import CHECKPOINTS, CONFIG, MASKS, METRICS, PAGE, PICTURE, PLAN, REFERENCE, RESULT
from tightfit.training.checkpoint.files import FILES, Files
from tightfit.training.checkpoint.find import checkpoint_paths
from tightfit.training.checkpoint.names import PART, part_name
from tightfit.training.checkpoint.reading import digest_of
from tightfit.training.data.tokenizer import TOKENIZER_FILES, TextTokenizer
from tightfit.training.lock import locked
from tightfit.training.tracking.base import FOLDER as TRACKING
from tightfit.training.tracking.base import IDENTITY
from tightfit.units import format_bytes

__all__ = ["CHECKPOINTS", "CONFIG", "METRICS", "PAGE", "PICTURE", "PLAN", "RESULT", "RUN_FILES", "RunFolder"]

RUN_FILES = (
    CONFIG,
    PLAN,
    METRICS,
    RESULT,
    PICTURE,
    PAGE,
    *TOKENIZER_FILES,
    CONFIG_FILE,
    WEIGHTS_FILE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "generation_config.json",
    REFERENCE,
    MASKS,
)
_WEIGHTS = "model*.safetensors*"  # large models of transformers come in several files with an index
_PARTS = (".part-*", ".probe", *(f".{name}.part" for name in (*RUN_FILES, ".probe")))  # what a killed run was writing
_PROBE = ".probe"  # written and removed, to learn how long a checkpoint takes
_BLOCK = 512  # bytes in the unit of `st_blocks`, whatever the file system's own


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: str | Path, files: Files = FILES):
        self.path = Path(path)
        self._files = files

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are, or will be."""
        return self.path / CHECKPOINTS

    @contextmanager
    def claimed(self, *, overwrite: bool, resume: bool = False) -> Iterator[bool]:
        """While it is entered, the folder is this training's alone; False where its file system knows no locks.

        Entered before anything expensive happens. Raises `OutputError` where the folder cannot be made or written,
        where another training is writing there, or where it holds a run that is neither resumed nor overwritten.
        """
        with ExitStack() as held:
            held.callback(self._remove_if_empty, [p for p in (self.path, *self.path.parents) if not p.exists()])
            with self._writing(self.path):
                self._files.make_folders(self.path)
                is_locked = held.enter_context(locked(self.path))
            earlier = [*self._earlier(), *([self.checkpoints] if self.has_checkpoints() else [])]
            if earlier and not overwrite and not resume:
                raise OutputError(
                    f"{self.path}: holds an earlier run ({earlier[0].name}): go on with it with --resume (in Python "
                    "resume=True), choose another output.folder, or set output.overwrite to true"
                )
            yield is_locked

    def _remove_if_empty(self, folders: Sequence[Path]) -> None:
        """A training that ended before it wrote anything leaves no folder where there was none, nor one above."""
        with suppress(OSError):  # it has content, or somebody else removed it
            for folder in folders:
                folder.rmdir()

    def demand_room(self, needed_bytes: int) -> None:
        """Raises `OutputError` unless so many bytes find room, those of an earlier run given back."""
        with self._writing(self.path):
            free = shutil.disk_usage(self.path).free
            held = [*self._earlier(), *(path for path in self.checkpoints.rglob("*") if path.is_file())]
            free += sum(path.stat().st_blocks * _BLOCK for path in held)
        if free < needed_bytes:
            raise OutputError(
                f"{self.path}: {format_bytes(free)} are free, and this training writes {format_bytes(needed_bytes)} "
                "there, most of it weights: make room, or choose another output.folder"
            )

    def block_bytes(self) -> int:
        """The unit in which the file system gives out its space."""
        with self._writing(self.path):
            return os.statvfs(self.path).f_frsize

    def has_checkpoints(self) -> bool:
        """True if there is a checkpoint, intact or not."""
        return bool(checkpoint_paths(self.checkpoints))

    def clear(self, *, keep: Sequence[str] = (), checkpoints: bool = True) -> None:
        """Remove the files of an earlier run but for those named, its checkpoints and its trackers' files too unless
        told otherwise; and nothing else.
        """
        for path in self._earlier():
            if path.name not in keep:
                with self._writing(path):
                    self._files.unlink(path)
        if checkpoints:
            with self._writing(self.checkpoints):
                self._clear_checkpoints()
            with self._writing(self.path / TRACKING):
                if (self.path / TRACKING / IDENTITY).is_file():  # else it is somebody's own folder
                    self._files.remove(self.path / TRACKING)
        for part in (part for pattern in _PARTS for part in self.path.glob(pattern)):
            with self._writing(part):
                self._files.remove(part)

    def _clear_checkpoints(self) -> None:
        """Each under another name first: what a kill leaves of it is nobody's checkpoint, not a damaged one."""
        for path in checkpoint_paths(self.checkpoints):
            self._files.rename(path, path.with_name(part_name(path.name.lstrip("."))))
        self._files.remove_all(self.checkpoints.glob(f"{PART}*"))
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self._files.rmdir(self.checkpoints)

    def write(self, name: str, content: str | bytes) -> Path:
        """A whole file, under its name only when it is complete and on its disk. Raises `OutputError`."""
        data = content.encode() if isinstance(content, str) else content
        target = self.path / name
        part = target.with_name(f".{name}.part")
        with self._writing(target):
            try:
                self._files.write_file(part, data)
                self._files.rename(part, target)
            except BaseException:
                with suppress(OSError):  # the first error is the one to know; the next run removes what is left
                    self._files.unlink(part)
                raise
            self._files.sync_folder(self.path)
        return target

    def append(self, name: str, lines: Sequence[str]) -> None:
        """Lines at the end of a file: all of them or, where `OutputError` is raised, none.

        A power cut may take them away: see `sync`.
        """
        with self._writing(self.path / name):
            descriptor = self._files.append(self.path / name)
            try:
                end = os.fstat(descriptor).st_size
                try:
                    self._files.write_all(descriptor, "".join(f"{line}\n" for line in lines).encode())
                except OSError:
                    self._files.truncate(descriptor, end)
                    raise
            finally:
                self._files.close(descriptor)

    def sync(self, name: str) -> None:
        """Until all lines that were appended to a file are on its disk. Raises `OutputError`."""
        with self._writing(self.path / name):
            self._files.sync_file(self.path / name)
            self._files.sync_folder(self.path)

    def size_on_disk(self, name: str) -> int:
        """The bytes of a file, all of them on the disk when this returns; 0 where there is no such file."""
        path = self.path / name
        if not path.is_file():
            return 0
        self.sync(name)
        with self._writing(path):
            return path.stat().st_size

    def truncate(self, name: str, size: int) -> int:
        """Leave a file's first `size` bytes; the bytes that it lacks to that, all where there is no such file."""
        path = self.path / name
        found = path.stat().st_size if path.is_file() else 0
        if found > size:
            with self._writing(path):
                descriptor = self._files.append(path)
                try:
                    self._files.truncate(descriptor, size)
                    self._files.sync(descriptor)
                finally:
                    self._files.close(descriptor)
        return max(0, size - found)

    def drop_last_line(self, name: str, holding: str) -> None:
        """Without its last line, where that holds a text."""
        lines = self.lines(name)
        if lines and holding in lines[-1]:
            self.truncate(name, sum(len(line.encode()) + 1 for line in lines[:-1]))

    def seconds_to_write(self, count: int) -> float:
        """Measured: so many bytes written here, on the disk, hashed and removed."""
        content = bytes(count)
        begun = time.perf_counter()
        digest_of(content)
        path = self.write(_PROBE, content)
        seconds = time.perf_counter() - begun
        with self._writing(path):
            self._files.unlink(path)
        return seconds

    def lines(self, name: str) -> list[str]:
        """The lines of a file; none where it cannot be read."""
        try:
            return (self.path / name).read_text("utf-8").splitlines()
        except OSError:
            return []

    def write_tokenizer(self, tokenizer: TextTokenizer) -> None:
        self._write_files(tokenizer.save)

    def write_model(self, model: nn.Module) -> None:
        """Weights and config. Raises `OutputError`."""
        self._write_files(lambda folder: save_model(model, folder))

    def _write_files(self, write: Callable[[Path], None]) -> None:
        """Move the files that `write` puts in a folder here when all of it is there."""
        part = self.path / f".part-{secrets.token_hex(4)}"
        with self._writing(self.path):
            try:
                self._files.mkdir(part)
                try:
                    write(part)
                except OutputError as error:  # by the folder that the user knows
                    raise OutputError(str(error).replace(str(part), str(self.path))) from error
                for file in sorted(part.iterdir()):
                    file.chmod(_usual_mode(part))  # safetensors lets nobody but the owner read
                    self._files.sync_file(file)
                    self._files.rename(file, self.path / file.name)
                self._files.sync_folder(self.path)
                self._files.rmdir(part)
            except BaseException:
                with suppress(OSError):  # the first error is the one to know; the next run removes what is left
                    self._files.remove(part)
                raise

    def _earlier(self) -> list[Path]:
        named = [self.path / name for name in RUN_FILES]
        return [path for path in dict.fromkeys([*named, *self.path.glob(_WEIGHTS)]) if path.is_file()]

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(path, error) from error


def _usual_mode(folder: Path) -> int:
    """The permissions that a new file gets."""
    probe = folder.with_name(f"{folder.name}.probe")
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    return mode
