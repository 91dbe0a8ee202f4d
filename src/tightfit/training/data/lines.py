"""The lines of a file and their numbers; plain, gzip or zstd, with one line in memory at a time."""

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tightfit.errors import DataError

# A longer line is most likely a file without line ends. It is refused before all of it is in memory.
MOST_LINE_BYTES = 64 * 2**20
GZIP, ZSTD = ".gz", ".zst"
COMPRESSED = (GZIP, ZSTD)
# What files of these kinds begin with, whatever their names are.
_GZIP_MARK, _ZSTD_MARK, _MARK_BYTES = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", 8
_OTHERS = (
    (b"PK\x03\x04", "a zip archive or an Excel workbook"),
    (b"\xfd7zXZ\0", "xz"),
    (b"BZh91AY&", "bzip2"),
    (b"SQLite f", "a database"),
    (b"ARROW1", "an Arrow file"),
    (b"%PDF-", "a PDF"),
)
_READ_BYTES = 1 << 14  # compressed bytes at a time: a frame of zeros is 20,000 times as long


def kind_suffix(path: Path) -> str:
    """The suffix that says what a file holds, in lower case: `.jsonl` of `corpus.JSONL.gz`."""
    stem = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return stem.suffix.lower()


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed content of a file. Raises `DataError` where it cannot be read, also while it is entered."""
    try:
        with _open(path) as file:
            yield file
    except OSError as error:
        if error.errno is not None:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        raise _damaged(path, error) from error  # gzip's and pyarrow's errors about the content have no number
    except (EOFError, zlib.error, *_zstd_errors()) as error:
        raise _damaged(path, error) from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Each line that is not blank, with its number from 1 on; None for a line of more than `MOST_LINE_BYTES`.

    Raises `DataError` where the file cannot be read.
    """
    with opened(path) as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MOST_LINE_BYTES)):
                    pass
                yield number, None
            elif line.strip():
                yield number, line


def _damaged(path: Path, error: Exception) -> DataError:
    said = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{path}: the compressed data is damaged or cut off ({said}): make the file again")


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    file = path.open("rb")
    mark = file.read(_MARK_BYTES)
    if suffix not in COMPRESSED and (other := next((name for begin, name in _OTHERS if mark.startswith(begin)), None)):
        file.close()
        raise DataError(f"{path}: {other}, which is not read: take out the files of text or records in it")
    if suffix == GZIP or mark.startswith(_GZIP_MARK):
        file.close()
        return gzip.open(path, "rb")  # pyright: ignore[reportReturnType] - a buffered reader in all but its type
    if suffix == ZSTD or mark.startswith(_ZSTD_MARK):
        file.close()
        return _open_zstd(path)
    file.seek(0)
    return file


def _open_zstd(path: Path) -> IO[bytes]:
    if standard := _module("compression.zstd"):  # of Python 3.14 and newer
        return io.BufferedReader(_Frames(path, standard.ZstdDecompressor))
    if package := _module("zstandard"):
        return io.BufferedReader(_Frames(path, package.ZstdDecompressor().decompressobj))
    if pyarrow := _module("pyarrow"):  # `datasets` brings it
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    raise DataError(
        f"{path}: nothing here reads zstd: pip install 'tightfit[data]' (it brings zstandard), or decompress the file"
    )


class _Frames(io.RawIOBase):
    """A zstd file of one or more frames. zstandard's own reader ends without an error where a frame is cut off."""

    def __init__(self, path: Path, decompressor: Callable[[], Any]):
        self._file, self._make = path.open("rb"), decompressor
        self._frame: Any = None
        self._compressed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._file.read(_READ_BYTES)
            if not self._compressed and self._frame is not None:
                raise EOFError("a frame has no end")
            if not self._compressed:
                return 0
            self._frame = self._frame or self._make()
            self._content = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstd_errors() -> tuple[type[Exception], ...]:
    """The exceptions that the modules that read zstd raise for damaged data; only those already imported can have
    raised.
    """
    found = (sys.modules.get(name) for name in ("compression.zstd", "zstandard"))
    return tuple(module.ZstdError for module in found if module is not None)


def _module(name: str) -> Any:
    """A module where it is installed, else None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
