"""Items written one after another: into memory, or into files that are mapped when they are whole."""

import hashlib
import os
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.training.data.store import Kind, TokenStore, fingerprint_of

TOKENS, OFFSETS, LEARNT = "tokens", "offsets", "learnt"
_BUFFER_BYTES = 1 << 20


class TokenWriter(ABC):
    """Takes items and becomes a `TokenStore`. With `has_learnt`, every item has flags, else none."""

    def __init__(self, kind: Kind, dtype: np.dtype, *, has_learnt: bool):
        self.kind: Kind = kind
        self.dtype, self.items, self.tokens = dtype, 0, 0
        self._digests = {name: hashlib.sha256() for name in (TOKENS, OFFSETS, *([LEARNT] if has_learnt else []))}

    def add(self, ids: np.ndarray, learnt: np.ndarray | None) -> None:
        """One more item."""
        assert (learnt is not None) == (LEARNT in self._digests)
        if self.items == 0:
            self._append(OFFSETS, np.zeros(1, np.int64))
        self.items += 1
        self.tokens += len(ids)
        self._append(TOKENS, ids.astype(self.dtype))
        self._append(OFFSETS, np.array([self.tokens], np.int64))
        if learnt is not None:
            self._append(LEARNT, learnt)

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of each array."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.kind, self.dtype, self.digests)

    def _append(self, name: str, array: np.ndarray) -> None:
        content = array.tobytes()
        self._digests[name].update(content)
        self._write(name, content)

    @abstractmethod
    def _write(self, name: str, content: bytes) -> None: ...


class MemoryWriter(TokenWriter):
    """Into memory."""

    def __init__(self, kind: Kind, dtype: np.dtype, *, has_learnt: bool):
        super().__init__(kind, dtype, has_learnt=has_learnt)
        self._content = {name: bytearray() for name in self._digests}

    def _write(self, name: str, content: bytes) -> None:
        self._content[name] += content

    def store(self, skipped_lines: int) -> TokenStore:
        dtypes: dict[str, Any] = {TOKENS: self.dtype, OFFSETS: np.int64, LEARNT: np.bool_}
        arrays = {name: np.frombuffer(content, dtypes[name]) for name, content in self._content.items()}
        return TokenStore(
            arrays[TOKENS],
            arrays[OFFSETS],
            arrays.get(LEARNT),
            kind=self.kind,
            fingerprint=self.fingerprint,
            skipped_lines=skipped_lines,
        )


class FileWriter(TokenWriter):
    """Into files of a folder, one for each array. Close it before the files are read: raises `OSError` where some of it
    did not reach the disk.
    """

    def __init__(self, folder: Path, kind: Kind, dtype: np.dtype, *, has_learnt: bool):
        super().__init__(kind, dtype, has_learnt=has_learnt)
        self._files = {name: (folder / array_file(name)).open("wb", _BUFFER_BYTES) for name in self._digests}

    def _write(self, name: str, content: bytes) -> None:
        self._files[name].write(content)

    def close(self) -> None:
        with ExitStack() as closing:
            for file in self._files.values():
                closing.enter_context(file)
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())  # some file systems say only now that there was no room


def array_file(name: str) -> str:
    """The file of an array, its numbers one after another as the machine has them."""
    return f"{name}.bin"


def map_store(
    folder: Path,
    *,
    kind: Kind,
    dtype: str,
    items: int,
    tokens: int,
    has_learnt: bool,
    fingerprint: str,
    skipped_lines: int,
) -> TokenStore:
    """The store in the files of a folder, mapped into memory: read page by page when it is used."""

    def mapped(name: str, kind_of_number: Any, count: int) -> np.ndarray:
        return np.memmap(folder / array_file(name), kind_of_number, mode="r", shape=(count,)).view(np.ndarray)

    return TokenStore(
        mapped(TOKENS, np.dtype(dtype), tokens),
        mapped(OFFSETS, np.int64, items + 1),
        mapped(LEARNT, np.bool_, tokens) if has_learnt else None,
        kind=kind,
        fingerprint=fingerprint,
        skipped_lines=skipped_lines,
    )
