"""The cache of tokens: each tokenized source in a folder of its own, named by a key of all that made it.

An entry is written under another name, and renamed when it is whole. Runs side by side may both write one, and both get
whole files. What a killed run was writing is locked by nobody, and removed by the next one. `manifest.json` has the
sizes and hashes of the files, which are checked whenever an entry is opened. The folder may be deleted at any time.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tightfit.devices.cache import cache_folder
from tightfit.devices.present import Notice
from tightfit.training.data.bad_lines import Tally
from tightfit.training.data.store import Kind, TokenStore
from tightfit.training.data.writing import FileWriter, MemoryWriter, TokenWriter, array_file, map_store

MANIFEST = "manifest.json"
LAYOUT = 2  # of the files of an entry
MOST_BYTES = 64 * 2**30  # of all entries; the ones that were not used for longest go first
UNUSED_DAYS = 60
_PART = ".part-"
_YOUNG = 60.0  # seconds: what is being made may not be locked yet
_DAY = 86400.0


@dataclass(frozen=True)
class CacheEntry:
    """A tokenized source: its items, the files that the tokenizer was read from by name, and notes about the source."""

    store: TokenStore
    tokenizer: Mapping[str, str]
    first_skipped: str = ""
    notes: tuple[str, ...] = ()


class Filling(Protocol):
    """A function that reads a source and writes its items, as often as it is asked to."""

    kind: Kind
    dtype: np.dtype
    has_learnt: bool

    @property
    def tokenizer(self) -> Mapping[str, str]:
        """The files of the tokenizer."""
        ...

    def fill(self, writer: TokenWriter) -> Tally:
        """Write all items. Raises `DataError`. Returns the count of lines."""
        ...


def tokens_folder() -> Path:
    """The folder of the entries, in `TIGHTFIT_CACHE` or where this system keeps users' caches."""
    return cache_folder() / "tokens"


def cached(key: Mapping[str, Any], notice: Notice, folder: Path | None = None) -> CacheEntry | None:
    """The entry of a key; None where there is none. A damaged one is removed, and `notice` is told."""
    path = _path(folder or tokens_folder(), key)
    if not path.is_dir():
        return None
    try:
        entry = _open(path)
    except (OSError, _Damaged) as error:
        said = error.strerror if isinstance(error, OSError) else error
        notice(f"the token cache {path} is damaged ({said}): tokenizing again")
        shutil.rmtree(path, ignore_errors=True)
        return None
    with contextlib.suppress(OSError):  # a folder that cannot be written is read as well
        os.utime(path / MANIFEST)  # when it was last used
    return entry


def build(key: Mapping[str, Any] | None, filling: Filling, notice: Notice, folder: Path | None = None) -> CacheEntry:
    """Tokenize, into the entry of a key; without a key into files that last as long as they are mapped.

    Where the folder cannot be written, or is full, the items are kept in memory and `notice` is told.
    Raises `DataError` for what is wrong with the source.
    """
    folder = folder or tokens_folder()
    try:
        with _part(folder) as part:
            entry = _fill(part, key, filling)  # mapped: the files may be renamed or unlinked
            if key is not None:
                _publish(part, _path(folder, key))
        _evict(folder)
        return entry
    except OSError as error:
        notice(f"the token cache {folder} cannot be written ({error.strerror}): the tokens are kept in memory")
    writer = MemoryWriter(filling.kind, filling.dtype, has_learnt=filling.has_learnt)
    tally = filling.fill(writer)
    return CacheEntry(writer.store(tally.skipped), filling.tokenizer, tally.first, tally.notes)


class _Damaged(Exception):
    pass


def _path(folder: Path, key: Mapping[str, Any]) -> Path:
    spelled = json.dumps({"layout": LAYOUT, "byteorder": sys.byteorder, **key}, sort_keys=True)
    return folder / hashlib.sha256(spelled.encode()).hexdigest()[:40]


def _open(path: Path) -> CacheEntry:
    manifest = _manifest(path / MANIFEST)
    for name, expected in manifest["files"].items():
        _check(path / name, expected)
    tokenizer = {name: (path / name).read_text("utf-8") for name in manifest["tokenizer"]}
    return CacheEntry(_map(path, manifest), tokenizer, manifest["first_skipped"], tuple(manifest["notes"]))


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if manifest.pop("sha256") != _digest(manifest):
            raise _Damaged(f"{path.name}: its hash is another")
    except FileNotFoundError:
        raise _Damaged(f"{path.name} is missing") from None
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _Damaged(f"{path.name}: not a manifest: {type(error).__name__}") from None
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _Damaged(f"{path.name} has {size} bytes of {expected['bytes']}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise _Damaged(f"{path.name}: its hash is another")
    except FileNotFoundError:
        raise _Damaged(f"{path.name} is missing") from None


def _map(path: Path, manifest: Mapping[str, Any]) -> TokenStore:
    return map_store(
        path,
        kind=manifest["kind"],
        dtype=manifest["dtype"],
        items=manifest["items"],
        tokens=manifest["tokens"],
        has_learnt=manifest["has_learnt"],
        fingerprint=manifest["fingerprint"],
        skipped_lines=manifest["skipped_lines"],
    )


def _fill(part: Path, key: Mapping[str, Any] | None, filling: Filling) -> CacheEntry:
    writer = FileWriter(part, filling.kind, filling.dtype, has_learnt=filling.has_learnt)
    with contextlib.closing(writer):
        tally = filling.fill(writer)
    files = {
        array_file(name): {"bytes": (part / array_file(name)).stat().st_size, "sha256": digest}
        for name, digest in writer.digests.items()
    }
    for name, text in filling.tokenizer.items():
        content = text.encode()
        _write(part / name, content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {
        "key": key,
        "kind": writer.kind,
        "dtype": str(writer.dtype),
        "items": writer.items,
        "tokens": writer.tokens,
        "has_learnt": filling.has_learnt,
        "fingerprint": writer.fingerprint,
        "skipped_lines": tally.skipped,
        "first_skipped": tally.first,
        "notes": list(tally.notes),
        "tokenizer": list(filling.tokenizer),
        "files": files,
    }
    _write(part / MANIFEST, json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1).encode())
    return CacheEntry(_map(part, manifest), filling.tokenizer, tally.first, tally.notes)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)


def _publish(part: Path, path: Path) -> None:
    try:
        part.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # then another run was first, with the same content
            raise


@contextmanager
def _part(folder: Path) -> Iterator[Path]:
    """A folder for an entry that is being made: locked, so that nobody takes it for one that a killed run left."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_PART}*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(dir=folder, prefix=_PART))
    descriptor = os.open(part, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: age decides
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield part
    finally:
        os.close(descriptor)
        shutil.rmtree(part, ignore_errors=True)  # nothing is there once it is renamed


def _is_abandoned(part: Path) -> bool:
    try:
        age = time.time() - part.stat().st_mtime
        descriptor = os.open(part, os.O_RDONLY)
    except OSError:
        return False  # gone, or not ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age > _DAY * 7
    else:
        return age > _YOUNG
    finally:
        os.close(descriptor)


def _evict(folder: Path) -> None:
    """Remove entries that were not used for long, and the ones used least recently where all take too much room."""
    entries: list[tuple[float, int, Path]] = []
    for manifest in folder.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(OSError):  # another run removed it
            size = sum(file.stat().st_size for file in manifest.parent.iterdir())
            entries.append((manifest.stat().st_mtime, size, manifest.parent))
    total = 0
    for used, size, path in sorted(entries, reverse=True):
        total += size
        is_newest = total == size
        if not is_newest and (total > MOST_BYTES or time.time() - used > UNUSED_DAYS * _DAY):
            shutil.rmtree(path, ignore_errors=True)  # whoever has it mapped keeps its pages
