"""Files of a run, read with a line for each thing that is wrong with them instead of an error."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightfit.names import METRICS

TAIL_BYTES = 1 << 16  # of metrics.jsonl, where only the last line is wanted
MOST_BYTES = 1 << 26  # of a file that is read whole: a run's own are far smaller
MOST_PROBLEMS = 3  # lines of one file that are told one by one


@dataclass
class Problems:
    """Mutable: what is wrong in a run's folder, a line each."""

    lines: list[str] = field(default_factory=list)

    def add(self, name: str, reason: str) -> None:
        self.lines.append(f"{name}: {' '.join(reason.split())}")


def read_json(folder: Path, name: str, problems: Problems) -> dict[str, Any]:
    """The object in a file; empty where there is none, or none that can be read."""
    content = _content(folder / name, name, problems)
    if content is None:
        return {}
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        problems.add(name, f"not valid JSON: {error}")
        return {}
    if not isinstance(raw, dict):
        problems.add(name, "holds no object")
        return {}
    return raw


def read_yaml(folder: Path, name: str, problems: Problems) -> dict[str, Any]:
    """The mapping in a file; empty where there is none, or none that can be read."""
    import yaml

    content = _content(folder / name, name, problems)
    if content is None:
        return {}
    try:
        raw = yaml.safe_load(content.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.add(name, f"not valid YAML: {error}")
        return {}
    if not isinstance(raw, dict):
        problems.add(name, "holds no mapping")
        return {}
    return raw


def last_metrics(folder: Path, problems: Problems) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty where there is none."""
    try:
        with (folder / METRICS).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.add(METRICS, f"cannot be read: {error.strerror or error}")
        return {}
    whole = tail.rpartition(b"\n")[0]
    found = Problems()
    lines = list(_lines(whole.rpartition(b"\n")[2], 1, found))
    if found.lines:
        problems.add(METRICS, "its last whole line is no step of a training")
    return lines[-1] if lines else {}


def metrics(folder: Path, problems: Problems) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl that is one step; a last line that is cut counts as not yet written."""
    content = _content(folder / METRICS, METRICS, problems)
    if content is None:
        return []
    whole, newline, cut = content.rpartition(b"\n")
    found = Problems()
    steps = list(_lines(whole + newline, 1, found))
    for line in found.lines[:MOST_PROBLEMS]:
        problems.add(METRICS, line)
    if len(found.lines) > MOST_PROBLEMS:
        problems.add(METRICS, f"{len(found.lines) - MOST_PROBLEMS} more lines are no step of a training")
    if cut:
        problems.add(METRICS, "its last line is cut")
    return steps


def _lines(content: bytes, first: int, problems: Problems) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(content.split(b"\n"), start=first):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raw = None
        if isinstance(raw, dict) and count(raw, "step") is not None:
            yield raw
        else:
            problems.lines.append(f"line {number} is no step of a training")


def _content(path: Path, name: str, problems: Problems) -> bytes | None:
    try:
        if not path.is_file():
            if path.exists():
                problems.add(name, "is no file")
            return None
        if path.stat().st_size > MOST_BYTES:
            problems.add(name, "is larger than any run writes it")
            return None
        return path.read_bytes()
    except OSError as error:
        problems.add(name, f"cannot be read: {error.strerror or error}")
        return None


def number(record: Mapping[str, Any], *keys: str) -> float | None:
    """A finite number at a path of keys; None for anything else."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def count(record: Mapping[str, Any], *keys: str) -> int | None:
    """A whole number that is not below zero at a path of keys."""
    value = number(record, *keys)
    return value if isinstance(value, int) and value >= 0 else None
