"""One line of JSON, read strictly: what is wrong has a column, and nothing that readers disagree about is accepted."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tightfit.training.data.bad_lines import BadLine
from tightfit.training.data.encodings import what_to_do

Path = tuple[str | int, ...]
"""Where a value is in a record: keys of objects and indices of lists."""

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")  # of JSON; an escaped backslash begins no other
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_CONSTANTS = frozenset({"NaN", "Infinity", "-Infinity"})


def parse_line(line: bytes, *, is_first: bool = False) -> tuple[Any, str]:
    """The value that a line holds, and the line as text. The first line of a file may begin with a byte order mark.

    Raises `BadLine` for bytes that are not UTF-8, for what is not JSON by RFC 8259, for a key that stands twice in one
    object (readers differ in which of them they take), and for text nested deeper than Python reads.
    """
    try:
        text = line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 text: {error.reason}: {what_to_do(line)}", error.start + 1) from None
    return parse_text(text), text


def parse_text(text: str) -> Any:
    """The value that a text spells, as strictly: see `parse_line`."""
    try:
        return _DECODER.decode(text)
    except _Twice as twice:
        raise BadLine(f"the key {twice.key!r} stands twice in one object: keep one of them", _second(text)) from None
    except _Constant as constant:
        column = next(at for _, at in _positions(text, values=_CONSTANTS))
        raise BadLine(f"not valid JSON: {constant} is no number of JSON: write null", column + 1) from None
    except json.JSONDecodeError as error:
        # A JSON line is one line: the decoder's second line is the line's own end.
        raise BadLine(f"not valid JSON: {error.msg}", error.pos + 1) from None
    except RecursionError:
        raise BadLine("nested too deep to be read: remove the line", 1) from None
    except ValueError as error:  # a number of more digits than Python converts
        raise BadLine(f"not valid JSON: {str(error).split(';')[0]}", 1) from None


def column_of(text: str, path: Path) -> int:
    """The column, from 1 on, of a value in a line: of its key in an object, of itself in a list. 1 for the record."""
    return next((at + 1 for found, at in _positions(text) if found == path), 1)


def whole_text(value: str, text: str, path: Path) -> str:
    """`value`, if each of its characters is one: JSON can spell halves of surrogate pairs, which no encoding has.

    Raises `BadLine` with the column of the half in the line `text`.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        begin = column_of(text, path) - 1
        raise BadLine("half of a surrogate pair, which is no character: remove it", _half(text, begin) + 1) from None
    return value


class _Twice(Exception):
    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


class _Constant(Exception):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        raise _Twice(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return members


def _refuse_constant(name: str) -> Any:
    raise _Constant(name)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def _positions(text: str, values: frozenset[str] = frozenset()) -> Iterator[tuple[Path, int]]:
    """The path and the index of each value of a line that was parsed; only of the literals `values`, if given."""
    path: list[str | int] = []
    kinds: list[str] = []
    key, is_key = 0, False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "}]":
            kinds.pop()
            path.pop()
        elif mark == ",":
            is_key = kinds[-1] == "{"
            if not is_key:
                path[-1] = int(path[-1]) + 1
        elif mark == ":":
            is_key = False
        elif is_key:
            path[-1], key = json.loads(mark), token.start()
        else:
            at = key if kinds and kinds[-1] == "{" and not values else token.start()
            if not values or mark in values:
                yield tuple(path), at
            if mark in "{[":
                kinds.append(mark)
                path.append("" if mark == "{" else 0)
                is_key = mark == "{"


def _second(text: str) -> int:
    """The column of the first key that stands a second time in its object."""
    seen: list[set[str]] = []
    is_key = False
    kinds: list[str] = []
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "{[":
            kinds.append(mark)
            seen.append(set())
            is_key = mark == "{"
        elif mark in "}]":
            kinds.pop()
            seen.pop()
            is_key = False
        elif mark in ",:":
            is_key = mark == "," and kinds[-1] == "{"
        elif is_key and (name := json.loads(mark)) in seen[-1]:
            return token.start() + 1
        elif is_key:
            seen[-1].add(name)
    return 1


def _half(text: str, begin: int) -> int:
    """Where from `begin` on the first escape stands that spells half of a pair."""
    pending: re.Match[str] | None = None
    for escape in _ESCAPE.finditer(text, begin):
        code = int(escape[1], 16) if escape[1] else 0
        is_second = 0xDC00 <= code < 0xE000
        follows = pending is not None and pending.end() == escape.start()
        if pending is not None and not (is_second and follows):
            break
        if is_second and pending is None:
            return escape.start()
        pending = escape if 0xD800 <= code < 0xDC00 else None
    return begin if pending is None else pending.start()
