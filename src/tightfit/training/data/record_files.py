"""Files of records, told from their content: JSON lines, JSON lists, objects one after another, tables.

A name only decides where the content says nothing: a file without a record, or a table whose columns nobody knows.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

from tightfit.errors import DataError
from tightfit.training.data.bad_lines import BadLine
from tightfit.training.data.encodings import what_to_do
from tightfit.training.data.json_line import parse_line, parse_text
from tightfit.training.data.lines import COMPRESSED, MOST_LINE_BYTES, opened, read_lines
from tightfit.training.data.records import kind_of, wanted
from tightfit.training.data.store import Kind

Layout = Literal["lines", "values", "table", "text"]
JSON_LINES = frozenset({".jsonl", ".ndjson", ".jl"})
TABLES = {".csv": ",", ".tsv": "\t"}
JSON = ".json"
_DELIMITERS = ",\t;|"
_BEGIN_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
_LOOKED_AT = 100  # records, for one that says what the file holds
_NAME = re.compile(r"[\w .-]{1,40}")
_LIST, _OBJECT = re.compile(r'\[\s*(\{\s*["}]|\]|$)'), re.compile(r'\{\s*["}]')
_ANYWHERE = json.JSONDecoder()  # finds where a value ends; what is wrong inside of it is found by `parse_text`


@dataclass(frozen=True)
class FoundValue:
    """The content in the place of a record: its value, and the text that spells it, which begins at a line and a column
    of the file; or why there is none.
    """

    line: int
    value: Any = None
    text: str = ""
    column: int = 1
    bad: BadLine | None = None

    def place(self, path: Path, bad: BadLine) -> tuple[BadLine, str]:
        """An error with its column in the file, and its line there: the text of one record may have many."""
        if bad.column is None:
            return bad, f"{path}, line {self.line}"
        before = self.text[: bad.column - 1]
        below = before.count("\n")
        column = bad.column + self.column - 1 if not below else len(before) - before.rfind("\n")
        return BadLine(bad.reason, column), f"{path}, line {self.line + below}"


def layout_of(path: Path) -> Layout:
    """How a file holds its records. Raises `DataError` for a file named JSON that holds none."""
    suffixes = {suffix.lower() for suffix in path.suffixes} - set(COMPRESSED)
    with opened(path) as file:
        begin = file.read(_BEGIN_BYTES)
    text = begin.decode("utf-8-sig", errors="replace").lstrip()
    if _LIST.match(text) and (text[1:].strip(" \t\r\n") or JSON in suffixes):
        return "values"
    if _OBJECT.match(text):
        if _is_object(next(read_lines(path), (1, None))[1]) or suffixes & JSON_LINES:
            return "lines"
        if JSON in suffixes or _begins_with_object(text):
            return "values"
    if suffixes & JSON_LINES:
        return "lines"
    if suffixes & TABLES.keys():
        return "table"
    if JSON in suffixes:
        if not text:
            return "lines"
        raise DataError(f"{path}: neither a list of records nor one record a line: write one of them, or name it .txt")
    return "table" if _is_table(text) else "text"


def rows(path: Path, layout: Layout) -> Iterator[FoundValue]:
    """The contents of a file in the place of records. Raises `DataError` where it cannot be read on."""
    return {"lines": _lines, "values": _values, "table": _table}[layout](path)


def kind_in(path: Path, layout: Layout) -> Kind | None:
    """The kind of the first record that says so; None where none of the first does."""
    for row in islice(rows(path, layout), _LOOKED_AT):
        if isinstance(row.value, dict) and (kind := kind_of(row.value)) is not None:
            return kind
    return None


def check_known(path: Path, layout: Layout) -> None:
    """Raises `DataError` where a file holds objects, and none of them is a record of a known kind."""
    found = (row.value for row in islice(rows(path, layout), _LOOKED_AT) if isinstance(row.value, dict))
    value = next(found, None)
    if value is None:
        return
    called = "columns" if layout == "table" else "fields"
    names = ", ".join(islice(value, 12)) or "missing"
    inner = next((name for name, item in value.items() if _is_records(item)), None)
    hint = f"; the list in {inner!r} alone would be read" if inner is not None else ""
    raise DataError(f"{path}: its {called} are {names}: wanted {wanted()}{hint}")


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and kind_of(value[0]) is not None


def _is_object(line: bytes | None) -> bool:
    try:
        return isinstance(parse_line(line or b"", is_first=True)[0], dict)
    except BadLine:
        return False


def _begins_with_object(text: str) -> bool:
    try:
        return isinstance(_ANYWHERE.raw_decode(text)[0], dict)
    except (ValueError, RecursionError):
        return False


def _lines(path: Path) -> Iterator[FoundValue]:
    for number, line in read_lines(path):
        try:
            if line is None:
                raise BadLine(f"longer than {MOST_LINE_BYTES >> 20} MiB: write one record a line")
            value, text = parse_line(line, is_first=number == 1)
        except BadLine as bad:
            yield FoundValue(number, bad=bad)
            continue
        yield FoundValue(number, value, text)


def _values(path: Path) -> Iterator[FoundValue]:
    """The members of one list, or values one after another."""
    with opened(path) as file:
        window = _Window(file, path)
        is_list = window.next() == "["
        window.skip(is_list)
        is_first = True
        while window.next() != ("]" if is_list else ""):
            if is_list and not is_first:
                window.skip(window.expect(","))
                window.next()
            line, column = window.place()
            text = window.value()
            is_first = False
            try:
                yield FoundValue(line, parse_text(text), text, column)
            except BadLine as bad:
                yield FoundValue(line, None, text, column, bad)
        window.skip(is_list)
        window.expect("")


class _Window:
    """A part of a file of JSON, with a place in it that moves on."""

    def __init__(self, file: IO[bytes], path: Path):
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._read = "", 0, 0
        self._line, self._column, self._counted = 1, 1, 0  # of the place `_counted`

    def next(self) -> str:
        """The next character that is no space, the place moved to it; nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self, count: int) -> None:
        self._at += count

    def expect(self, mark: str) -> int:
        """The length of a mark that must be next, which nothing is at the end."""
        found = self.next()
        if found != mark:
            raise self._error(f"{found!r} where {mark!r} should be" if found and mark else
                              "something behind the end" if found else "the list does not end")  # fmt: skip
        return len(mark)

    def place(self) -> tuple[int, int]:
        """The line and the column of the place."""
        passed = self._text[self._counted : self._at]
        below = passed.count("\n")
        self._line += below
        self._column = len(passed) - passed.rfind("\n") if below else self._column + len(passed)
        self._counted = self._at
        return self._line, self._column

    def value(self) -> str:
        """The text of the value that begins here, the place moved behind it."""
        while True:
            try:
                _, end = _ANYWHERE.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                wrong = error.pos - self._at
                if len(self._text) - self._at > MOST_LINE_BYTES or not self._more():
                    self._at += wrong
                    raise self._error(error.msg) from None
                continue
            except RecursionError:
                raise self._error("nested too deep to be read") from None
            except ValueError as error:  # a number of more digits than Python converts
                raise self._error(str(error).split(";")[0]) from None
            if end == len(self._text) and self._text[end - 1] not in '}]"' and self._more():
                continue  # a number may go on
            text, self._at = self._text[self._at : end], end
            return text

    def _more(self) -> bool:
        content = self._file.read(max(_CHUNK_BYTES, len(self._text) - self._at))
        try:
            more = self._decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            what = what_to_do(error.object)
            raise DataError(f"{self._path}: not UTF-8 text: {error.reason} at byte {self._read}: {what}") from None
        self._read += len(content)
        self.place()
        self._text, self._at, self._counted = self._text[self._at :] + more, 0, 0
        return bool(content)

    def _error(self, reason: str) -> DataError:
        line, column = self.place()
        return DataError(f"{self._path}, line {line}, column {column}: not valid JSON: {reason}")


def _is_table(text: str) -> bool:
    """True if a text is a table: its first line has the names of a record, and its second as many fields."""
    first, _, rest = text.partition("\n")
    delimiter = _delimiter(first)
    if delimiter is None or not rest.strip():
        return False
    names = next(csv.reader([first], delimiter=delimiter))
    try:
        row = next(csv.reader(rest.splitlines(keepends=True), delimiter=delimiter), [])
    except csv.Error:
        return False
    return all(_NAME.fullmatch(name) for name in names) and len(row) == len(names)


def _delimiter(first: str) -> str | None:
    """The character between the names of a record in a table's first line."""
    for delimiter in _DELIMITERS:
        names = _names(next(csv.reader([first.strip()], delimiter=delimiter), []))
        if len(names) > 1 and kind_of(names) is not None:
            return delimiter
    return None


def _names(cells: list[str]) -> list[str]:
    """Columns as fields of records are named: in a table, Question stands for question."""
    return [cell.strip().lower().replace(" ", "_") for cell in cells]


def _table(path: Path) -> Iterator[FoundValue]:
    """The rows of a table whose first line has the columns' names."""
    csv.field_size_limit(max(csv.field_size_limit(), MOST_LINE_BYTES))  # of the process: a text may be a long field
    with opened(path) as file:
        first = _utf8(file.readline(MOST_LINE_BYTES), is_first=True, path=path)
        suffix = next((each for each in reversed(path.suffixes) if each.lower() in TABLES), ".csv").lower()
        delimiter = _delimiter(first) or TABLES[suffix]
        lines = (_utf8(line, path=path) for line in file)
        reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        names = _names(next(reader, []))
        if not names:
            return
        if len({*names}) < len(names) or not all(names):
            said = ", ".join(names)
            raise DataError(f"{path}: two columns have the same name, or one has none: {said}: name each of them")
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield FoundValue(line, bad=BadLine(f"not a row of a table: {error}"))
                continue
            if cells is None:
                return
            if not any(cells):
                continue
            if len(cells) != len(names):
                yield FoundValue(line, bad=BadLine(f"{len(cells)} fields, and the first line names {len(names)}"))
                continue
            yield FoundValue(line, dict(zip(names, cells, strict=True)))


def _utf8(line: bytes, *, path: Path, is_first: bool = False) -> str:
    try:
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason}: {what_to_do(line)}") from None
