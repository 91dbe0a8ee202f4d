"""`--adapter` and `--base`: the keys of `model.adapter` as one option. No torch here."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.errors import ConfigError, InputError, why_unreadable

if TYPE_CHECKING:
    from tightfit.training.config import AdapterConfig

DEFAULT = "default"
BASES = ("fp32", "bf16", "int8", "fp8", "nf4")


def adapter_setting(text: str, base: str | None) -> str:
    """The option as the value of `model.adapter`, in YAML. Raises `InputError`.

    The text is `default`, a JSON file with a `PeftConfig`, or keys of the section with commas between:
    `r=16,alpha=32,target_modules=q_proj+v_proj`.
    """
    given: dict[str, str] = {}
    if text.endswith(".json"):
        _demand_mapping(text)
        given["config"] = json.dumps(text)
    for item in () if text == DEFAULT or given else (part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise InputError(
                f"--adapter {text!r}: {item!r} is no key=value: write {DEFAULT}, or keys of model.adapter such as "
                "r=16,alpha=32,target_modules=q_proj+v_proj"
            )
        if key in given:
            raise InputError(f"--adapter {text!r}: {key} is given twice: keep one of them")
        given[key] = _names(value) if key == "target_modules" else value
    if base is not None and given.get("base", base) != base:
        raise InputError(f"--base {base} and base={given['base']} in --adapter differ: keep one of them")
    if base is not None:
        given["base"] = base
    return f"{{{', '.join(f'{key}: {value}' for key, value in given.items())}}}"


def _demand_mapping(file: str) -> None:
    """Raises `InputError` unless the file is JSON with keys: before anything is imported or run dry."""
    try:
        if not isinstance(json.loads(Path(file).read_text("utf-8")), dict):
            raise ValueError("it holds no mapping of keys")
    except (OSError, ValueError) as error:
        raise InputError(
            f"--adapter {file!r}: {why_unreadable(error)}: give the JSON of a PeftConfig, or keys such as r=16,alpha=32"
        ) from None


def base_of(setting: str) -> str | None:
    """The base that a setting of `adapter_setting` names."""
    found = re.search(r"base: (\w+)", setting)
    return None if found is None else found[1]


def adapter_of(text: str, base: str | None) -> "AdapterConfig":
    """The section that the options stand for. Raises `InputError`."""
    from tightfit.training.config import PretrainedModel, parse_config

    setting = adapter_setting(text, base)
    try:
        section = parse_config({"model": {"path": "any"}}, [f"model.adapter={setting}"]).model
    except ConfigError as error:
        reason = str(error).removeprefix(f"override model.adapter={setting}: ")
        raise InputError(f"--adapter {text!r}: {reason}") from None
    assert isinstance(section, PretrainedModel), "a section with a path"
    assert section.adapter is not None, "its adapter was given"
    return section.adapter


def _names(value: str) -> str:
    """Names of layers as a list; `all-linear` stands for all of them."""
    return value if value == "all-linear" else f"[{', '.join(name.strip() for name in value.split('+'))}]"
