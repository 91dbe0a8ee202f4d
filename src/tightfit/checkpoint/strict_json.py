"""JSON from files that somebody else may have written: read in full or refused, within bounds.

Python's reader takes more than JSON is: NaN, keys that come twice, numbers beyond a float as infinity. Here each of
these is a `ValueError`, and so is a nesting that is too deep for it.
"""

import json
import math
from typing import Any

MAX_BYTES = 32 << 20  # 80,000 tensors and their hashes; Python takes up to twenty times as much for them


def parse(content: bytes) -> Any:
    """The value that a text holds. Raises `ValueError`, whose text is one line without anything from the content."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"is {len(content):,} bytes long, more than {MAX_BYTES:,}")
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError:
        raise ValueError("is not a text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos:,}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("has a key twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"holds {name}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("holds a number beyond a float")
    return number
