"""YAML as people mean it: `1e-3` is a number, a key given twice is an error, and every error has its place."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tightfit.errors import ConfigError

# PyYAML follows YAML 1.1, where a number needs a point: it reads the learning rate 1e-3 as text.
_FLOAT_WITHOUT_POINT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")


class _StrictLoader(yaml.SafeLoader):
    """Reads; refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not _is_hashable(key):
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is no name", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} stands here twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _is_hashable(key: object) -> bool:
    """True if it can be a key; a tuple says that it can, though what it holds may not."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


class _Dumper(yaml.SafeDumper):
    """Writes so that `_StrictLoader` reads the same values back."""


for _class in (_StrictLoader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_WITHOUT_POINT, list("-+0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """The value that the YAML `text` holds. Raises `ConfigError` with `source`, line and column."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise ConfigError(f"{place}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> Any:
    """The value that the YAML file at `path` holds. Raises `ConfigError`."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file: give the path of a YAML configuration") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    return parse_yaml(text, str(path))


def write_yaml(value: Any) -> str:
    """`value` as YAML text, its keys in their own order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
