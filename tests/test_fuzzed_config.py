"""Whatever a configuration holds, it is valid or refused in one line.

Configurations are drawn by a seed from the whole schema: right values, values at the edge, values of other types,
unknown keys, aliases, sections that are none, overrides, and YAML files with characters changed.
"""

import datetime
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from tightfit.errors import LONGEST_LINE, TightfitError
from tightfit.training.config import Config, dump_config, load_config, parse_config
from tightfit.training.config.aliases import ALIASES
from tightfit.training.config.schema import SECTIONS
from tightfit.training.config.yaml_text import write_yaml

QUICK, WHOLE, PER_SEED = 300, 20_000, 100
ALL = [
    pytest.param(seed, marks=[] if seed < QUICK // PER_SEED else pytest.mark.slow) for seed in range(WHOLE // PER_SEED)
]

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 256, 10**30, -(10**30), 0.0, -0.5, 0.5, 1.0, 1e-3, 1e308, float("inf"),
    float("nan"), "", " ", "0", "1e-3", "auto", "null", "yes", "train", "model", "default", "80%", "0.5x", "22GiB",
    "-3GB", "1e999GB", "lots", "exact", "two\nlines", "\r", "\u2028", "ü漢🙂", "\x00", "x" * 3000, "%s {} {0}",
    [], [None], ["recompute"], ["rounding", "offload"], [[1]], [0.9, 0.95], {}, {"a": 1}, {"blocks": "layers.*"},
    {1: 2}, {"": None}, {"r": 4, "base": "nf4"}, datetime.date(2024, 1, 1), b"bytes", {"two\nlines": 1},
]  # fmt: skip
NAMES = [
    "",
    "x",
    "seeds",
    "max_step",
    "Model",
    "two\nlines",
    "a.b",
    "ü",
    "lr ",
    "preset",
    3,
    None,
    True,
    1.5,
    "__class__",
]


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON schema of each key, by `section.key`."""
    whole = TypeAdapter(Config).json_schema()
    found: dict[str, dict[str, Any]] = {}

    def gather(section: str, node: dict[str, Any]) -> None:
        for key in ("anyOf", "oneOf", "allOf"):
            for part in node.get(key, ()):
                gather(section, part)
        if "$ref" in node:
            gather(section, whole["$defs"][node["$ref"].rsplit("/", 1)[1]])
        for name, value in node.get("properties", {}).items():
            found.setdefault(f"{section}.{name}", value)

    for section, node in whole["properties"].items():
        gather(section, node)
    return found


SCHEMAS = schemas()


def right(draw: random.Random, schema: dict[str, Any]) -> Any:
    """A value that the schema of a key describes, or nearly."""
    if "anyOf" in schema:
        return right(draw, draw.choice(schema["anyOf"]))
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    kind = schema.get("type")
    if kind == "integer":
        return draw.choice([int(least), int(least) + 1, draw.randint(int(least) + 1, int(least) + 64), 2**31])
    if kind == "number":
        return draw.choice([least, least + 0.1, draw.random(), 1, 0.9])
    if kind == "array":
        return [right(draw, each) for each in schema.get("prefixItems", [schema.get("items", {})] * draw.randint(0, 3))]
    return {"boolean": draw.random() < 0.5, "null": None}.get(kind, schema.get("default", draw.choice(ODD)))


def value(draw: random.Random, name: str) -> Any:
    schema = SCHEMAS.get(name, {})
    if draw.random() < 0.15:
        return draw.choice(ODD)
    return schema.get("default") if draw.random() < 0.3 and "default" in schema else right(draw, schema)


def mapping(draw: random.Random) -> Any:
    """A whole configuration as YAML could give it."""
    if draw.random() < 0.02:
        return draw.choice(ODD)
    raw: dict[Any, Any] = {}
    for section, keys in SECTIONS.items():
        if draw.random() < 0.5:
            continue
        chosen = draw.sample(keys, min(len(keys), draw.choice([0, 1, 2, 3, 5])))
        raw[section] = {key: value(draw, f"{section}.{key}") for key in chosen}
        if draw.random() < 0.1:
            raw[section][draw.choice([*NAMES, *ALIASES])] = draw.choice(ODD)
        if draw.random() < 0.03:
            raw[section] = draw.choice(ODD)
    while draw.random() < 0.15:
        name = draw.choice([*NAMES, *ALIASES, *ALIASES])
        raw[name] = value(draw, ALIASES[name].key) if name in ALIASES else draw.choice(ODD)
    return raw


def override(draw: random.Random) -> str:
    name = draw.choice([*SCHEMAS, *SCHEMAS, *ALIASES, *SECTIONS, "memory.recompute.blocks", "x.y.z", ".", "", "a..b"])
    spelled = write_yaml(draw.choice(ODD) if draw.random() < 0.3 else value(draw, name)) if draw.random() < 0.8 else ""
    text = f"{name}={spelled.strip()}" if draw.random() < 0.95 else f"{name}"
    return mutated(draw, text) if draw.random() < 0.1 else text


def mutated(draw: random.Random, text: str) -> str:
    """With a few characters lost, doubled or replaced."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randint(0, len(text))
        put = draw.choice(["", text[at : at + 5] * 2, ":", "- ", "\n", "\t", "&a ", "*a", "!!python/object:os.system ",
                           "{", "\x00", "é", "'", "%", "? ", "|", "9" * 400, "<<: "])  # fmt: skip
        text = text[:at] + put + text[at + draw.randint(0, 3) :]
    return text


def outcome(read: Any) -> Config | str:
    """The configuration, or the line that refuses it."""
    try:
        return read()
    except TightfitError as error:
        line = str(error)
        assert line.strip()
        assert len(line.splitlines()) == 1, repr(line)
        assert len(line) <= LONGEST_LINE, line
        assert "pydantic" not in line.lower(), line
        return line


def drawn(seed: int) -> Iterator[random.Random]:
    for number in range(PER_SEED):
        yield random.Random(seed * PER_SEED + number)


@pytest.mark.keeps("20-000-drawn-configurations")
@pytest.mark.parametrize("seed", ALL)
def test_a_drawn_configuration_is_valid_or_refused_in_one_line(tmp_path, seed):
    valid = 0
    for draw in drawn(seed):
        raw = mapping(draw)
        overrides = [override(draw) for _ in range(draw.choice([0, 0, 1, 2]))]
        found = outcome(lambda raw=raw, overrides=overrides: parse_config(raw, overrides, source="run.yaml"))
        if isinstance(found, Config):
            valid += 1
            (tmp_path / "again.yaml").write_text(dump_config(found), "utf-8")
            assert load_config(tmp_path / "again.yaml") == found
        try:
            text = write_yaml(raw)
        except TypeError:  # keys of several types cannot be written in order
            continue
        path = tmp_path / "run.yaml"
        path.write_bytes((mutated(draw, text) if draw.random() < 0.7 else text).encode("utf-8", "surrogatepass"))
        outcome(lambda path=path: load_config(path))
    assert valid, "none of them is valid, so nothing is said about those"
