"""Documents: the text that is trained on, read where it lies."""

import json
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tightfit.data.encodings import what_to_do
from tightfit.errors import DataError

DEFAULT_SOURCE = "default"
# Packages that somebody installed lie inside the standard library's folder; they differ from machine to machine.
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")  # of JSON; an escaped backslash begins no other
_JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})


def read_documents(source: str, *, max_documents: int | None = None) -> Iterator[str]:
    """The documents of `source` in a fixed order, empty ones left out, at most `max_documents`.

    `source` is `default` (the Python standard library's help topics and sources), a .jsonl or .ndjson file of
    {"text": ...} lines, a folder of .txt, .md, .rst and .py files, or one text file. Raises `DataError`, with the line
    and column where a line is wrong, and where there is no document at all.
    """
    empty = True
    for document in islice(_with_text(_read(source)), max_documents):
        empty = False
        yield document
    if empty:
        raise DataError(f"data.source {source!r} holds no text: give a corpus with at least one document")


def _with_text(documents: Iterator[str]) -> Iterator[str]:
    return (document for document in documents if document.strip())


def _read(source: str) -> Iterator[str]:
    if source == DEFAULT_SOURCE:
        return _standard_library()
    path = Path(source)
    if path.is_dir():
        return _text_folder(path)
    if not path.exists():
        raise DataError(
            f"data.source {source!r}: no such file or folder: give a .jsonl file, a text file, a folder of text files "
            f"or {DEFAULT_SOURCE!r}"
        )
    return _json_lines(path) if path.suffix.lower() in _JSON_LINES_SUFFIXES else iter([read_text(path)])


def _standard_library() -> Iterator[str]:
    """Help topics, then module sources by path; sources that are not UTF-8 (made for tests of codecs) are left out."""
    for name in sorted(pydoc_data.topics.topics):
        yield pydoc_data.topics.topics[name]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _NOT_STANDARD.isdisjoint(path.relative_to(root).parts) and _is_utf8(content := path.read_bytes()):
            yield content.decode("utf-8")


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _text_folder(folder: Path) -> Iterator[str]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _TEXT_SUFFIXES and path.is_file())
    if not paths:
        suffixes = ", ".join(sorted(_TEXT_SUFFIXES))
        raise DataError(f"data.source {str(folder)!r} holds no text files: put {suffixes} files in it")
    return map(read_text, paths)


def read_text(path: Path) -> str:
    """The text of one file. Raises `DataError`."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        found = what_to_do(error.object)
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}: {found}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _json_lines(path: Path) -> Iterator[str]:
    """The texts of {"text": ...} lines; blank lines are skipped. Read as bytes, so that one bad line has a number."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of_line(line, path, number)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _text_of_line(line: bytes, path: Path, number: int) -> str:
    place = f"{path}, line {number}"
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}, column {error.start + 1}: not UTF-8 text: {error.reason}: {what_to_do(line)}"
        ) from None
    except json.JSONDecodeError as error:
        # A JSON line is one line: what the decoder calls its second line is the line's own end.
        raise DataError(f"{place}, column {error.pos + 1}: not valid JSON: {error.msg}") from None
    if not isinstance(record, dict) or "text" not in record:
        raise DataError(f'{place}, column 1: no "text": write one {{"text": ...}} object a line')
    text = record["text"]
    if not isinstance(text, str):
        column = line.decode("utf-8").find('"text"') + 1
        raise DataError(f'{place}, column {column}: "text" is {type(text).__name__}, wanted a string')
    if not _is_whole(text):
        column = _lone_surrogate(line.decode("utf-8")) + 1
        raise DataError(f"{place}, column {column}: half of a surrogate pair, which is no character: remove it")
    return text


def _is_whole(text: str) -> bool:
    """Whether every character is one: JSON can spell halves of pairs, and no encoding has them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lone_surrogate(line: str) -> int:
    """Where in a line of JSON the first escape stands that spells half of a pair."""
    pending: re.Match[str] | None = None
    for escape in _ESCAPE.finditer(line):
        code = int(escape[1], 16) if escape[1] else 0
        is_second = 0xDC00 <= code < 0xE000
        follows = pending is not None and pending.end() == escape.start()
        if pending is not None and not (is_second and follows):
            break
        if is_second and pending is None:
            return escape.start()
        pending = escape if 0xD800 <= code < 0xDC00 else None
    return 0 if pending is None else pending.start()
