"""Published models by the names people use, as their own configurations say; no torch here."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Published:
    """A published model: the repository its config.json stands in, its number of parameters, and its config."""

    source: str
    parameters: int
    config: dict[str, Any]


@cache
def published() -> dict[str, Published]:
    """All of them, by name."""
    table = tomllib.loads(files("tightfit.models").joinpath("published.toml").read_text("utf-8"))
    return {
        name: Published(entry["source"], entry["parameters"], _with_nulls(entry["config"]))
        for name, entry in table.items()
    }


def _with_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: the fields that are null in config.json are listed by name."""
    return {k: v for k, v in config.items() if k != "nulls"} | dict.fromkeys(config.get("nulls", ()))
