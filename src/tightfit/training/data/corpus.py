"""Corpora: texts, conversations and preference pairs, read from where they are, one record in memory at a time."""

import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

from tightfit.errors import DataError
from tightfit.training.data.bad_lines import BadLine, Tally
from tightfit.training.data.encodings import what_to_do
from tightfit.training.data.hub import HUB, HubRows, SavedRows, is_saved
from tightfit.training.data.lines import COMPRESSED, kind_suffix, opened
from tightfit.training.data.record_files import JSON, JSON_LINES, TABLES, Layout, check_known, kind_in, layout_of, rows
from tightfit.training.data.records import Record, Text, read_record
from tightfit.training.data.store import Kind

DEFAULT_SOURCE = "default"
Format = Literal["auto", "text", "conversations", "preferences"]
# Packages that somebody installed lie inside the standard library's folder; they differ from machine to machine.
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})
_RECORD_SUFFIXES = frozenset({*JSON_LINES, *TABLES, JSON})
_MAY_HOLD_RECORDS = _RECORD_SUFFIXES | {".txt"}  # in a folder, where sources and notes may stand beside records


class Corpus(Protocol):
    """A source whose kind is known."""

    @property
    def kind(self) -> Kind: ...

    @property
    def unused(self) -> tuple[str, ...]:
        """The files of a folder that are not read."""
        ...

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        """Each record and its place (file and line) in a fixed order; `tally` is told of bad lines.

        Raises `DataError`.
        """
        ...

    def files(self) -> list[Path] | None:
        """The files that hold all of it, in a fixed order; None where it is no files."""
        ...

    def identity(self) -> str | None:
        """An identity that differs where the content does, without reading it; None where nothing says so."""
        ...


def open_corpus(source: str, data_format: Format = "auto") -> Corpus:
    """The corpus that `source` names: see `read_documents`, and `hub` for Hugging Face datasets. Raises `DataError`."""
    corpus = _open(source, data_format)
    if data_format not in ("auto", corpus.kind):
        raise DataError(f"data.format is {data_format}, and data.source {source!r} holds text: change one of them")
    return corpus


def read_records(
    corpus: Corpus, source: str, tally: Tally, *, max_documents: int | None = None
) -> Iterator[tuple[Record, str]]:
    """The records of a corpus and their places, documents without text left out, at most `max_documents`.

    Raises `DataError` where there is none.
    """
    empty = True
    for found in islice(_with_text(corpus.records(tally)), max_documents):
        empty = False
        yield found
    tally.finish()
    if empty:
        what = {"text": "text", "conversations": "conversations", "preferences": "preference pairs"}[corpus.kind]
        raise DataError(f"data.source {source!r} holds no {what}: give a corpus with at least one document")


def read_documents(source: str, *, max_documents: int | None = None) -> Iterator[str]:
    """The documents of `source` in a fixed order, empty ones left out, at most `max_documents`.

    `source` is `default` (the Python standard library's help topics and sources), a file of records with a "text"
    (JSON lines, a JSON list, a table), a folder of .txt, .md, .rst and .py files, or one text file; files may be
    compressed (.gz, .zst). Raises `DataError`, with the line and column where a line is wrong, and where there is no
    document at all.
    """
    for record, _ in read_records(open_corpus(source, "text"), source, Tally(), max_documents=max_documents):
        assert isinstance(record, Text)
        yield record.text


def read_text(path: Path) -> str:
    """The text of one file. Raises `DataError`."""
    with opened(path) as file:
        content = file.read()
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        found = what_to_do(error.object)
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}: {found}") from None


def _with_text(records: Iterator[tuple[Record, str]]) -> Iterator[tuple[Record, str]]:
    return ((record, place) for record, place in records if not isinstance(record, Text) or record.text.strip())


def _open(source: str, data_format: Format) -> Corpus:
    if source == DEFAULT_SOURCE:
        return _StandardLibrary()
    if source.startswith(HUB):
        return HubRows.open(source, None if data_format == "auto" else data_format)
    path = Path(source)
    if not path.exists():
        raise DataError(
            f"data.source {source!r}: no such file or folder: give a .jsonl file, a text file, a folder of text files, "
            f"{DEFAULT_SOURCE!r}, or {HUB}NAME for a dataset of the Hugging Face Hub"
        )
    if is_saved(path):
        _alone(path)
        return SavedRows.open(path, None if data_format == "auto" else data_format)
    if path.is_dir():
        return _folder(path, data_format)
    layout = layout_of(path)
    return _TextFiles([path]) if layout == "text" else _Records.open([(path, layout)], data_format)


def _alone(saved: Path) -> None:
    """Raises `DataError` where a folder holds a dataset and other records, of which one would not be read."""
    beside = [path for path in sorted(saved.rglob("*")) if kind_suffix(path) in {*JSON_LINES, *TABLES}]
    if saved.is_dir() and beside:
        raise DataError(
            f"data.source {str(saved)!r} holds a dataset and records beside it ({beside[0].name}): name the folder "
            "or the file of one of them"
        )


def _folder(folder: Path, data_format: Format) -> Corpus:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    texts = [path for path in found if kind_suffix(path) in _TEXT_SUFFIXES]
    layouts: dict[Path, Layout] = {path: layout_of(path) for path in found if kind_suffix(path) in _MAY_HOLD_RECORDS}
    documents = [path for path, layout in layouts.items() if layout == "text"]
    records: list[tuple[Path, Layout]] = [
        (path, layout) for path, layout in layouts.items() if layout != "text" and _holds(path, layout)
    ]
    if records and documents:
        raise DataError(
            f"data.source {str(folder)!r} holds text files ({documents[0].name}) and records ({records[0][0].name}): "
            "name the folder or the file of one of them"
        )
    used = {path for path, _ in records} or {path for path in texts if layouts.get(path, "text") == "text"}
    unused = tuple(str(path.relative_to(folder)) for path in found if path not in used and not _is_hidden(path, folder))
    if records:  # a README beside them is no document
        return _Records.open(records, data_format, unused)
    if not used:
        suffixes = ", ".join(sorted(_TEXT_SUFFIXES | _RECORD_SUFFIXES))
        raise DataError(
            f"data.source {str(folder)!r} holds no text files and no records: put {suffixes} or .parquet files in it, "
            f"or compressed ones ({', '.join(COMPRESSED)})"
        )
    return _TextFiles([path for path in texts if path in used], unused)


def _holds(path: Path, layout: Layout) -> bool:
    """True if a file of a folder is part of the corpus: what describes it (dataset_info.json) is not."""
    return kind_suffix(path) != JSON or kind_in(path, layout) is not None


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


@dataclass(frozen=True)
class _TextFiles:
    """Each file is a document."""

    paths: list[Path]
    unused: tuple[str, ...] = ()
    kind: Kind = "text"

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        for path in self.paths:
            tally.lines += 1
            yield Text(read_text(path)), str(path)

    def files(self) -> list[Path]:
        return self.paths

    def identity(self) -> None:
        return None


class _StandardLibrary:
    """Help topics, then module sources by path; sources that are not UTF-8 (made for tests of codecs) are left out."""

    kind: Kind = "text"
    unused = ()

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        for name in sorted(pydoc_data.topics.topics):
            yield Text(pydoc_data.topics.topics[name]), name
        for path in self.files():
            if _is_utf8(content := path.read_bytes()):
                yield Text(content.decode("utf-8")), str(path)

    def files(self) -> list[Path]:
        """The topics are in one of them."""
        root = Path(sysconfig.get_path("stdlib"))
        return [path for path in sorted(root.rglob("*.py")) if _NOT_STANDARD.isdisjoint(path.relative_to(root).parts)]

    def identity(self) -> None:
        return None


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True)
class _Records:
    """Files of records, each in its layout. `unused` are files beside them that are not read."""

    layouts: list[tuple[Path, Layout]]
    kind: Kind
    unused: tuple[str, ...] = ()

    @classmethod
    def open(cls, layouts: list[tuple[Path, Layout]], data_format: Format, unused: tuple[str, ...] = ()) -> "_Records":
        if data_format != "auto":
            return cls(layouts, data_format, unused)
        first, layout = layouts[0]
        kind = kind_in(first, layout)
        if kind is None and (layout != "lines" or kind_suffix(first) == JSON):
            check_known(first, layout)
        return cls(layouts, kind or "text", unused)  # reading says which line is wrong

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        for path, layout in self.layouts:
            for row in rows(path, layout):
                tally.lines += 1
                try:
                    if row.bad is not None:
                        raise row.bad
                    record = read_record(row.value, self.kind, row.text, tally.unused)
                except BadLine as bad:
                    tally.refuse(*row.place(path, bad))
                    continue
                if record is not None:
                    yield record, f"{path}, line {row.line}"

    def files(self) -> list[Path]:
        return [path for path, _ in self.layouts]

    def identity(self) -> None:
        return None
