"""A rejected configuration in one clear line: which key, where, what was found, what is wanted."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tightfit.models.decoder_config import DecoderConfig
from tightfit.training.config.aliases import ALIASES
from tightfit.training.config.schema import SECTIONS, AdapterConfig, RecomputeConfig, field_names
from tightfit.training.config.settings import Key, Settings

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_FOUND_LENGTH = 60
_NESTED: dict[Key, type] = {("memory", "recompute"): RecomputeConfig, ("model", "adapter"): AdapterConfig}


def explain(error: ValidationError, raw: Mapping[str, Any], settings: Settings, source: str) -> str:
    """The first thing wrong in `raw` (unknown keys before wrong values) as one line, and how many more there are.

    `settings` say how and where the user wrote each key; `source` names the file for what has no place of its own.
    """
    problems = _by_key(error, raw)
    key, details = min(problems.items(), key=lambda problem: problem[1][0]["type"] not in _UNKNOWN)
    setting = settings.get(tuple(str(part) for part in key[:2])) or settings.get(tuple(str(part) for part in key[:1]))
    place = setting.source if setting else source
    line = _unknown_key(key, raw) if details[0]["type"] in _UNKNOWN else _wrong_value(key, details)
    written = f" (written as {setting.written})" if setting and setting.written not in line else ""
    more = f" ({len(problems) - 1} more after this one)" if len(problems) > 1 else ""
    return f"{place}: {line}{written}{more}"


def _by_key(error: ValidationError, raw: Mapping[str, Any]) -> dict[tuple, list]:
    """Pydantic's errors by the key they are about, deeper keys in place of the shallower ones they explain.

    A union reports one error for each of its types, at places such as `('memory', 'budget', 'int')`.
    """
    problems: dict[tuple, list] = {}
    for detail in error.errors():
        problems.setdefault(_path_in(raw, detail["loc"], detail["type"] == "missing"), []).append(detail)
    return {
        key: details
        for key, details in problems.items()
        if not any(len(other) > len(key) > 0 and other[: len(key)] == key for other in problems)
    }


def _path_in(raw: Any, location: Sequence[int | str], missing: bool) -> tuple:
    """The parts of pydantic's location that are keys or positions in `raw`; the others name types."""
    path: list[int | str] = []
    place = raw
    for part in location:
        if not _holds(place, part):
            continue
        place = place[part]
        path.append(part)
    return (*path, location[-1]) if missing and not isinstance(location[-1], int) else tuple(path)


def _holds(place: Any, part: int | str) -> bool:
    if isinstance(part, int):
        return isinstance(place, (list, tuple)) and part < len(place)
    return isinstance(place, Mapping) and part in place


def _wrong_value(key: tuple, details: list) -> str:
    name, detail = _name(key), details[0]
    if detail["type"] == "value_error":
        return f"{name}: {detail['ctx']['error']}" if name else str(detail["ctx"]["error"])
    if any(each["type"] in ("missing", "too_long") for each in details):
        return f"{name} is {_found(detail['input'])}, which has too few or too many values"
    wanted = " or ".join(dict.fromkeys(_wanted(each["msg"]) for each in details))
    return f"{name} is {_found(detail['input'])}, wanted {wanted}"


def _wanted(message: str) -> str:
    """Pydantic's "Input should be a valid integer" without its beginning, in YAML's words."""
    text = message.removeprefix("Input should be ").removeprefix("a valid ")
    words = {"integer": "an integer", "string": "text", "number": "a number", "boolean": "true or false"}
    if text.startswith("tuple"):
        return "a list"
    if "dictionary" in text:
        return "a mapping of keys"
    return words.get(text, text)


def _found(value: Any) -> str:
    kinds = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", tuple: "a list"}
    text = repr(value)
    shown = text if len(text) <= _FOUND_LENGTH else text[:_FOUND_LENGTH] + "..."
    return f"{shown} ({kinds.get(type(value), 'a mapping' if isinstance(value, dict) else 'nothing')})"


def _unknown_key(key: tuple, raw: Mapping[str, Any]) -> str:
    section, name = key[:-1], str(key[-1])
    if section == ("model",) and "path" in raw["model"] and name in field_names(DecoderConfig):
        return f"model.{name} does not apply to the model that model.path names: remove one of the two"
    if section == ("model",) and name in SECTIONS["model"]:
        return f"model.{name} applies only beside model.path, which is not given"
    return f"unknown key {_name(key)}{_suggestion(section, name)}"


def _suggestion(section: Key, name: str) -> str:
    """The nearest known name: in the same section, else anywhere."""
    if section and section[0] in SECTIONS and len(section) == 1:
        here = list(SECTIONS[section[0]])
    else:
        here = list(field_names(_NESTED[section])) if section in _NESTED else []
    prefix = "".join(f"{part}." for part in section)
    elsewhere = {key: f"{place}.{key}" for place, keys in SECTIONS.items() for key in keys}
    if near := difflib.get_close_matches(name, here, n=1):
        return f": did you mean {prefix}{near[0]}?"
    if name in elsewhere:
        return f": did you mean {elsewhere[name]}?"
    known = {**{place: place for place in SECTIONS}, **elsewhere, **{alias: alias for alias in ALIASES}}
    if near := difflib.get_close_matches(name, known, n=1):
        meant = known[near[0]]
        return f": did you mean a key of {meant}?" if section and meant in SECTIONS else f": did you mean {meant}?"
    return f": known are {', '.join(here or SECTIONS)}"


def _name(key: tuple) -> str:
    """`("memory", "levers", 1)` as `memory.levers[1]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")
