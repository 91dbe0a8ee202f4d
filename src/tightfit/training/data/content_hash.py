"""The content of a source, as one hash: of the content of its files, so that a copy elsewhere is the same source."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tightfit.errors import DataError

# Smaller files are read each time. A larger one is read again if its size, times or inode are others than when its hash
# was taken; nobody can set the time of a change (ctime).
REMEMBERED_BYTES = 16 * 2**20
_TICK_NS = 2_000_000_000  # file systems have times of up to 2 s: a file may change twice within one


def hash_files(paths: Sequence[Path], memory: Path) -> str:
    """The hash of the names and contents of files. `memory` is the folder where hashes of large ones are kept."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0{_hash_file(path, memory)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _hash_file(path: Path, memory: Path) -> str:
    try:
        before = path.stat()
        if before.st_size < REMEMBERED_BYTES:
            return _read(path)
        known = memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
        signature = [before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
        if (found := _known(known, signature)) is not None:
            return found
        now = time.time_ns()
        found = _read(path)
        if max(before.st_mtime_ns, before.st_ctime_ns) + _TICK_NS < now:
            _keep(known, {"path": str(path.resolve()), "signature": signature, "sha256": found})
        return found
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known(path: Path, signature: list[int]) -> str | None:
    try:
        kept = json.loads(path.read_text("utf-8"))
        return kept["sha256"] if kept["signature"] == signature else None
    except (OSError, ValueError, KeyError, TypeError):  # nothing is kept, or what is kept is damaged: read the file
        return None


def _keep(path: Path, record: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # then it is read again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(part, path)
