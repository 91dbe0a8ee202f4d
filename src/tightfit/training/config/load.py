"""From YAML and overrides to a `Config`, and back to YAML."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.errors import ConfigError, ModelError
from tightfit.models.decoder_config import PRESETS
from tightfit.training.config.explain import explain
from tightfit.training.config.schema import Config
from tightfit.training.config.settings import Settings, apply_override, as_mapping, read_mapping
from tightfit.training.config.yaml_text import read_yaml, write_yaml


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file at `path`, with `overrides` such as `training.max_steps=20` laid over it.

    A later override wins over an earlier one and over the file. Paths inside are relative to the working folder.
    Raises `ConfigError` in one line: the key, where it stands, what was found and what is wanted.
    """
    return parse_config(read_yaml(Path(path)), overrides, source=str(path))


def parse_config(raw: Any, overrides: Sequence[str] = (), *, source: str = "configuration") -> Config:
    """The same from a mapping of sections, as YAML would give it; `source` is what errors call it."""
    settings = read_mapping(raw, source)
    for override in overrides:
        settings = apply_override(settings, override)
    return _validate(settings, source)


def dump_config(config: Config) -> str:
    """The whole configuration as YAML, every default written out; `load_config` reads the same `Config` from it."""
    return write_yaml(config.model_dump(mode="json"))


def _validate(settings: Settings, source: str) -> Config:
    mapping = as_mapping(settings)
    if "preset" in mapping.get("model", {}):
        place = settings["model", "preset"].source
        mapping["model"] = _without_preset(mapping["model"], place)
    try:
        return Config.model_validate(mapping)
    except ValidationError as error:
        raise ConfigError(explain(error, mapping, settings, source)) from None
    except ModelError as error:
        raise ConfigError(f"{source}: {error}") from None


def _without_preset(model: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The model section with its preset written out under the keys that stand beside it."""
    own = {key: value for key, value in model.items() if key != "preset"}
    name = model["preset"]
    if "path" in own:
        raise ConfigError(f"{source}: model.preset and model.path are both given: keep one of them")
    if name is None:
        return own
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PRESETS)}"
        raise ConfigError(f"{source}: model.preset {name!r} is not known: {hint}")
    return {**PRESETS[name], **own}
