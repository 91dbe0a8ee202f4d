"""Reads a file for the doctor: a record, a snapshot, a plan, an estimate, or a log."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.memory.snapshot import is_pickle, is_snapshot, read_snapshot, snapshot_of
from tightfit.planner.plans import Plan
from tightfit.planner.records import StepFigures
from tightfit.recipes.doctor.symptoms import LoggedFailure
from tightfit.training.monitoring.record import KIND, Record

WANTED = (
    "wanted a record of tightfit profile, a CUDA memory snapshot, a plan or an estimate as JSON, or a log with an "
    "out-of-memory error in it"
)


def read_subject(path: Path) -> Any:
    """The content of a file as a subject of `diagnose`. Raises `InputError` for any other file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if is_pickle(content):
        return read_snapshot(path)
    text = content.decode("utf-8", errors="replace")
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Any:
    """A text as a subject of `diagnose`. `name` is for messages. Raises `InputError` for any other text."""
    if not text.strip():
        raise InputError(f"{name}: is empty: {WANTED}")
    if text.lstrip().startswith("{"):
        try:
            raw = json.loads(text)
        except ValueError:
            raw = None  # a log may begin with a brace too
        if raw is not None:
            return _of_json(raw, name)
    found = LoggedFailure.of(name, text)
    if found is None:
        raise InputError(f"{name}: no out-of-memory error in it: {WANTED}")
    return found


def _of_json(raw: Mapping[str, Any], name: str) -> Any:
    try:
        if raw.get("kind") == KIND:
            return Record.from_dict(raw)
        if is_snapshot(raw):
            return snapshot_of(raw)
        if "planned" in raw:
            return Plan.from_dict(raw)
        if "timeline" in raw:
            known = {field.name for field in fields(StepFigures)}
            return StepFigures.from_dict({key: value for key, value in raw.items() if key in known})
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise InputError(f"{name}: is damaged, or of another version ({type(error).__name__}: {error})") from error
    raise InputError(f"{name}: is JSON of another kind: {WANTED}")
