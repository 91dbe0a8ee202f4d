"""JSON from files that somebody else may have written: read in full or refused, within bounds.

Python's reader takes more than JSON is: NaN, keys that come twice, numbers beyond a float as infinity. Here each of
these is a `ValueError`, and so is a nesting that is too deep for it.
"""

import json
import math
from typing import Any

MAX_BYTES = 16 << 20  # 80,000 tensors and their hashes
MAX_CONTAINERS = 1 << 20  # an empty list is two bytes of JSON, and of Python's memory 64
_MOST_DIGITS = 4000


def parse(content: bytes) -> Any:
    """The value that a text holds. Raises `ValueError`, whose text is one line without anything from the content."""
    check_bounds(content)
    try:
        return _READER.decode(content.decode())
    except UnicodeDecodeError:
        raise ValueError("is not a text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos:,}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def check_bounds(content: bytes) -> None:
    """Raises `ValueError` for a text that `parse` refuses unread."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"is {len(content):,} bytes long, more than {MAX_BYTES:,}")
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS:
        raise ValueError(f"has more than {MAX_CONTAINERS:,} lists and objects")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("has a key twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"holds {name}, which is not JSON")


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:  # Python's own limit, by which it would refuse the number in its own words
        raise ValueError("holds a number of too many digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("holds a number beyond a float")
    return number


_READER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole
)
