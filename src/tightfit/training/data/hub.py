"""Hugging Face datasets: by name from the Hub, from a folder that `save_to_disk` wrote, or from Parquet files.

Rows are read one at a time from memory-mapped Arrow files, or as a stream from Parquet, and none stays in memory.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from tightfit.errors import DataError
from tightfit.training.data.bad_lines import BadLine, Tally
from tightfit.training.data.records import TURN_LISTS, Record, kind_of, read_record, wanted
from tightfit.training.data.store import Kind

HUB = "hf:"
PARQUET, _PARQUET_MARK = ".parquet", b"PAR1"
_SAVED = ("dataset_dict.json", "state.json")  # of several splits, and of one
_OPTIONS = {"name", "split", "revision", "streaming"}
_INSTALL_HINT = "pip install 'tightfit[data]'"
_USUAL_SPLIT = "train"


def is_saved(path: Path) -> bool:
    """True if a path is a dataset on this disk: a folder of `save_to_disk`, or Parquet files."""
    if path.is_file():
        with path.open("rb") as file:
            return path.suffix.lower() == PARQUET or file.read(len(_PARQUET_MARK)) == _PARQUET_MARK
    return any((path / name).is_file() for name in _SAVED) or next(path.rglob(f"*{PARQUET}"), None) is not None


@dataclass(frozen=True)
class _Rows:
    """The rows of a dataset."""

    source: str
    rows: Any
    kind: Kind
    unused: tuple[str, ...] = ()

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        for number, row in enumerate(_read(self.rows, self.source), start=1):
            place = f"{self.source}, row {number}"
            tally.lines += 1
            try:
                record = read_record(_listed(row), self.kind, unused=tally.unused)
            except BadLine as bad:
                tally.refuse(bad, place)
                continue
            if record is not None:
                yield record, place


class SavedRows(_Rows):
    """A dataset on this disk."""

    @classmethod
    def open(cls, path: Path, kind: Kind | None) -> "SavedRows":
        datasets, source = _datasets(str(path)), str(path)
        if path.is_dir() and any((path / name).is_file() for name in _SAVED):
            rows = _loaded(source, lambda: _one_split(datasets.load_from_disk(source), source))
        else:
            files = [str(file) for file in _parquet_files(path)]
            rows = _loaded(
                source, lambda: datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
            )
        return cls(source, rows, kind or _kind(rows, source))

    def files(self) -> list[Path]:
        path = Path(self.source)
        return _parquet_files(path) or sorted(file for file in path.rglob("*") if file.is_file())

    def identity(self) -> None:
        return None


class HubRows(_Rows):
    """A dataset by name: `hf:NAME`, and after a `?` name=, split=, revision=, streaming=true."""

    @classmethod
    def open(cls, source: str, kind: Kind | None) -> "HubRows":
        name, _, query = source.removeprefix(HUB).partition("?")
        options = dict(parse_qsl(query))
        if not name or options.keys() - _OPTIONS or options.get("streaming", "true") not in ("true", "false"):
            raise DataError(
                f"data.source {source!r}: write {HUB}NAME, or {HUB}NAME?name=CONFIG&split=SPLIT&revision=COMMIT&"
                "streaming=true"
            )
        datasets = _datasets(source)
        rows = _loaded(
            source,
            lambda: datasets.load_dataset(
                name,
                options.get("name"),
                split=options.get("split", _USUAL_SPLIT),
                revision=options.get("revision"),
                streaming=options.get("streaming") == "true",
            ),
        )
        return cls(source, rows, kind or _kind(rows, source))

    def files(self) -> None:
        return None

    def identity(self) -> str | None:
        """The dataset's own fingerprint, which a stream has not."""
        fingerprint = getattr(self.rows, "_fingerprint", None)
        if fingerprint is None:
            return None
        return hashlib.sha256(f"{self.source} {fingerprint} {len(self.rows)}".encode()).hexdigest()


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"data.source {source!r} needs the package datasets: {_INSTALL_HINT}") from error
    return datasets


def _loaded(source: str, load: Any) -> Any:
    try:
        return load()
    except DataError:
        raise
    # `datasets` raises errors of many packages for what it cannot find, read or download.
    except Exception as error:
        raise _unreadable(source, error) from error


def _read(rows: Iterable[Any], source: str) -> Iterator[Mapping[str, Any]]:
    reading = iter(rows)
    while True:
        try:
            row = next(reading)
        except StopIteration:
            return
        except Exception as error:  # as above: of a stream, the files are opened only now
            raise _unreadable(source, error) from error
        yield row


def _unreadable(source: str, error: Exception) -> DataError:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return DataError(f"data.source {source!r}: the dataset cannot be read: {type(error).__name__}: {said}")


def _one_split(loaded: Any, source: str) -> Any:
    if not isinstance(loaded, Mapping):
        return loaded
    if _USUAL_SPLIT in loaded or len(loaded) == 1:
        return loaded[_USUAL_SPLIT if _USUAL_SPLIT in loaded else next(iter(loaded))]
    names = ", ".join(loaded)
    raise DataError(f"data.source {source!r}: no split {_USUAL_SPLIT!r}: give the folder of one of {names}")


def _parquet_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob(f"*{PARQUET}") if file.is_file())


def _kind(rows: Any, source: str) -> Kind:
    row = _listed(next(_read(rows, source), {}))
    names = list(rows.column_names or row)
    kind = kind_of(names) or kind_of(row)  # what a name holds says more than the name
    if kind is None:
        raise DataError(f"data.source {source!r}: its columns are {', '.join(names)}: wanted {wanted()}")
    return kind


def _listed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a line of JSON has it: lists of turns where `datasets` has a turn's fields as lists of their own, and
    without the nulls inside of a field, which Arrow adds where other rows have a member that this one has not.
    """
    return {name: without_nulls(_turns(value) if name in TURN_LISTS else value) for name, value in row.items()}


def without_nulls(value: Any) -> Any:
    """The same without members of objects that are null, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _turns(value: Any) -> Any:
    columns = list(value.values()) if isinstance(value, dict) else []
    if not columns or not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return value
    return [dict(zip(value, turn, strict=True)) for turn in zip(*columns, strict=True)]
