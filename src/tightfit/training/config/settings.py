"""The user's settings, key by key: the file, then the overrides, with aliases translated to the keys they mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.errors import ConfigError
from tightfit.training.config.aliases import ALIASES, AliasValueError
from tightfit.training.config.schema import SECTIONS
from tightfit.training.config.yaml_text import parse_yaml

Key = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One value, the key as the user wrote it, and where: the file's path or the override's text."""

    value: Any
    written: str
    source: str


Settings = dict[Key, Setting]


def _translate(section: Key, name: str, value: Any, source: str) -> tuple[Key, Setting]:
    """The key that `name` in `section` (empty: the top level) means, and its setting."""
    written = ".".join((*section, name))
    alias = ALIASES.get(name)
    if alias is None or (section and name in SECTIONS[section[0]]):
        return (*section, name), Setting(value, written, source)
    try:
        meaning = alias.convert(value)
    except AliasValueError as error:
        raise ConfigError(f"{source}: {written} is {value!r}, wanted {error}") from None
    return tuple(alias.key.split(".")), Setting(meaning, written, source)


def _contradict(one: Any, other: Any) -> bool:
    """Two mappings agree where they share no key with different values; other values where they are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(one[key] != other[key] for key in one.keys() & other.keys())
    return one != other


def _put(settings: Settings, key: Key, setting: Setting) -> None:
    """Adds a setting to others of the same source. Raises `ConfigError` where two contradict each other."""
    former = settings.get(key)
    if former is not None and _contradict(former.value, setting.value):
        raise ConfigError(
            f"{setting.source}: {former.written} and {setting.written} both set {'.'.join(key)} and contradict each "
            f"other ({former.value!r} and {setting.value!r}): keep one of them"
        )
    if former is not None and isinstance(former.value, Mapping):
        setting = Setting({**former.value, **setting.value}, former.written, former.source)
    settings[key] = setting


def read_mapping(raw: Any, source: str) -> Settings:
    """The settings of a whole configuration as YAML gives it. Raises `ConfigError`."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: holds {raw!r}, wanted the sections {', '.join(SECTIONS)}")
    settings: Settings = {}
    for name, value in raw.items():
        if name in SECTIONS and isinstance(value, Mapping):
            for inner, inner_value in value.items():
                _put(settings, *_translate((name,), str(inner), inner_value, source))
        elif name in SECTIONS and value is not None:
            keys = ", ".join(f"{name}.{key}" for key in SECTIONS[name])
            raise ConfigError(f"{source}: {name} is {value!r}, wanted a section, whose keys are {keys}")
        elif name not in SECTIONS:
            _put(settings, *_translate((), str(name), value, source))
    return settings


def apply_override(settings: Settings, text: str) -> Settings:
    """`settings` with `key=value` laid over them, the value read as YAML. Raises `ConfigError`.

    A key may be deeper than a setting (`memory.recompute.blocks=layers.*`), or a whole section, which it replaces.
    """
    name, equals, value_text = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"override {text!r}: write key=value, for example training.max_steps=20")
    source = f"override {text}"
    value = parse_yaml(value_text, source)
    if name in SECTIONS:
        kept = {key: setting for key, setting in settings.items() if key[0] != name}
        return kept | read_mapping({name: value}, source)
    *section, last = name.split(".")
    if len(section) > 1:
        key, inner = tuple(section[:2]), [*section[2:], last]
        return settings | {key: Setting(_set_inside(settings.get(key), inner, value), name, source)}
    if section and section[0] not in SECTIONS:
        return settings | {(section[0], last): Setting(value, name, source)}
    key, setting = _translate(tuple(section), last, value, source)
    return settings | {key: setting}


def _set_inside(setting: Setting | None, inner: Sequence[str], value: Any) -> dict[str, Any]:
    """A setting's mapping with `value` at the path `inner` in it."""
    mapping = dict(setting.value) if setting is not None and isinstance(setting.value, Mapping) else {}
    first, *rest = inner
    known = mapping.get(first)
    mapping[first] = _set_inside(Setting(known, "", ""), rest, value) if rest else value
    return mapping


def as_mapping(settings: Settings) -> dict[str, Any]:
    """The settings as the nested mapping that the schema validates."""
    nested: dict[str, Any] = {}
    for key, setting in settings.items():
        *section, name = key
        place = nested
        for part in section:
            place = place.setdefault(part, {})
        place[name] = setting.value
    return nested
