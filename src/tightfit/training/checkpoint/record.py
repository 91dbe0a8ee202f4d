"""The record beside the tensors of a checkpoint: any JSON, and the numbers that JSON lacks, each read back as it was.

Whole numbers of any size and finite floats are JSON's own; Python writes the shortest text that reads back as the same
float. What JSON lacks is an object with one key: `{"$float": "nan"}`, `"inf"` or `"-inf"`; `{"$int": "0x..."}` beyond
1024 bits (Python refuses to write long ones in tens); `{"$dict": {...}}` around an object whose own keys begin with a
dollar. Tuples come back as lists.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100  # Python's own reader and writer of JSON go some hundreds deep
_LONG_BITS = 1024
_HEX = re.compile("-?0x[0-9a-f]+")
_FLOAT, _INT, _DICT = "$float", "$int", "$dict"


def encoded(value: Any, where: str = "record", depth: int = 0) -> Any:
    """The value as plain JSON. Raises `ValueError` for what is none, naming where it stands."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where[:80]}...: is nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value if value.bit_length() <= _LONG_BITS else {_INT: hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        return [encoded(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where}: has the key {key!r}, and only texts can be keys")
        found = {key: encoded(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
        return {_DICT: found} if any(key.startswith("$") for key in found) else found
    raise ValueError(f"{where}: a {type(value).__name__} is no JSON")


def decoded(value: Any, depth: int = 0) -> Any:
    """The value that `encoded` was given. Raises `ValueError` for what it cannot have written."""
    if depth > 2 * MAX_DEPTH + 2:  # each level of a value may stand in an object of its own
        raise ValueError("is nested too deeply")
    if isinstance(value, list):
        return [decoded(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return _items(value, depth)
    if len(value) != 1:
        raise ValueError("has a key that begins with a dollar beside others")
    ((key, content),) = value.items()
    if key == _DICT and isinstance(content, dict):
        return _items(content, depth)
    if key == _FLOAT and content in ("nan", "inf", "-inf"):
        return float(content)
    if key == _INT and isinstance(content, str) and _HEX.fullmatch(content):
        return int(content, 16)
    raise ValueError("has an unknown key that begins with a dollar")


def _items(value: dict[str, Any], depth: int) -> dict[str, Any]:
    return {key: decoded(item, depth + 1) for key, item in value.items()}
