"""Published seconds as facts, and which half of them a fit may see.

`seconds.json` holds what others measured and published: a source, a card, a configuration and a figure a row. A row
that says what the dry run cannot say yet has its reason in `unsaid` and is judged by nobody.

A row belongs to the half that its name hashes to. The rule was committed before anything was fitted.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("seconds.json")


def sources() -> dict[str, Any]:
    """Where the rows come from, and what their figures mean."""
    return json.loads(PATH.read_text(encoding="utf-8"))["sources"]


def rows() -> list[dict[str, Any]]:
    """Every row that a dry run can say."""
    return [row for row in _all() if "unsaid" not in row]


def unsaid() -> list[dict[str, Any]]:
    """The rows that it cannot, each with its reason."""
    return [row for row in _all() if "unsaid" in row]


def is_for_fitting(row: dict[str, Any]) -> bool:
    """Whether a fit may see the row; the other rows judge what was fitted."""
    return hashlib.sha256(row["id"].encode()).digest()[0] % 2 == 0


def _all() -> list[dict[str, Any]]:
    return json.loads(PATH.read_text(encoding="utf-8"))["rows"]
