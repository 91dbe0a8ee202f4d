"""Corpora: texts, conversations and preference pairs, read from where they are, one record in memory at a time."""

import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

from tightfit.data.bad_lines import BadLine, Tally
from tightfit.data.encodings import what_to_do
from tightfit.data.hub import HUB, HubRows, SavedRows, is_saved
from tightfit.data.json_line import parse_line
from tightfit.data.lines import COMPRESSED, MOST_LINE_BYTES, kind_suffix, opened, read_lines
from tightfit.data.records import Record, Text, kind_of, read_record
from tightfit.data.store import Kind
from tightfit.errors import DataError

DEFAULT_SOURCE = "default"
Format = Literal["auto", "text", "conversations", "preferences"]
# Packages that somebody installed lie inside the standard library's folder; they differ from machine to machine.
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})
_JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_LOOKED_AT = 100  # lines, for one that says what the file holds


class Corpus(Protocol):
    """A source whose kind is known."""

    @property
    def kind(self) -> Kind: ...

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        """Each record and its place (file and line) in a fixed order; `tally` is told of bad lines.

        Raises `DataError`.
        """
        ...

    def files(self) -> list[Path] | None:
        """The files that hold all of it, in a fixed order; None where it is no files."""
        ...

    def identity(self) -> str | None:
        """What differs where the content does, without reading it; None where nothing says so."""
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

    `source` is `default` (the Python standard library's help topics and sources), a .jsonl or .ndjson file of
    {"text": ...} lines, a folder of .txt, .md, .rst and .py files, or one text file; files may be compressed (.gz,
    .zst). Raises `DataError`, with the line and column where a line is wrong, and where there is no document at all.
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
        return SavedRows.open(path, None if data_format == "auto" else data_format)
    if path.is_dir():
        return _folder(path, data_format)
    if kind_suffix(path) in _JSON_LINES_SUFFIXES:
        return _JsonLines.open([path], data_format)
    if kind_suffix(path) == ".json" and data_format not in ("auto", "text"):
        raise DataError(f"{path}: JSON and not JSON lines: write one record a line, as `jq -c '.[]'` does, in a .jsonl")
    return _TextFiles([path])


def _folder(folder: Path, data_format: Format) -> Corpus:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    texts = [path for path in found if kind_suffix(path) in _TEXT_SUFFIXES]
    json_lines = [path for path in found if kind_suffix(path) in _JSON_LINES_SUFFIXES]
    documents = [path for path in texts if kind_suffix(path) == ".txt"]
    if json_lines and documents:
        raise DataError(
            f"data.source {str(folder)!r} holds text files ({documents[0].name}) and JSON lines ({json_lines[0].name}):"
            " name the folder or the file of one of them"
        )
    if json_lines:  # a README beside them is no document
        return _JsonLines.open(json_lines, data_format)
    if not texts:
        suffixes = ", ".join(sorted(_TEXT_SUFFIXES | _JSON_LINES_SUFFIXES))
        raise DataError(
            f"data.source {str(folder)!r} holds no text files: put {suffixes} or .parquet files in it, or compressed "
            f"ones ({', '.join(COMPRESSED)})"
        )
    return _TextFiles(texts)


@dataclass(frozen=True)
class _TextFiles:
    """Each file is a document."""

    paths: list[Path]
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
class _JsonLines:
    """Files of one record a line; blank lines are skipped. Read as bytes, so that one bad line has a number."""

    paths: list[Path]
    kind: Kind

    @classmethod
    def open(cls, paths: list[Path], data_format: Format) -> "_JsonLines":
        return cls(paths, _kind_in(paths[0]) if data_format == "auto" else data_format)

    def records(self, tally: Tally) -> Iterator[tuple[Record, str]]:
        for path in self.paths:
            for number, line in read_lines(path):
                place = f"{path}, line {number}"
                tally.lines += 1
                try:
                    record = self._record(line, is_first=number == 1)
                except BadLine as bad:
                    tally.refuse(bad, place)
                    continue
                yield record, place

    def _record(self, line: bytes | None, *, is_first: bool) -> Record:
        if line is None:
            raise BadLine(f"longer than {MOST_LINE_BYTES >> 20} MiB: write one record a line")
        value, text = parse_line(line, is_first=is_first)
        return read_record(value, self.kind, text)

    def files(self) -> list[Path]:
        return self.paths

    def identity(self) -> None:
        return None


def _kind_in(path: Path) -> Kind:
    """What the first line that says so holds; text where none of the first lines does, which reading then refuses."""
    for number, line in islice(read_lines(path), _LOOKED_AT):
        try:
            value, _ = parse_line(line or b"", is_first=number == 1)
        except BadLine:
            continue
        if isinstance(value, dict) and (kind := kind_of(value)) is not None:
            return kind
    return "text"
