"""Published models by the names people use, as their own configurations say; no torch here."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

# Words of a repository's name that say what a model was trained for or how it is stored, and nothing about its shape.
_NO_SHAPE = ("chat", "hf", "instruct", "it", "pt")
_BASE = re.compile(r"(?<=\d[bm])[^a-z0-9]*base\b")  # behind a size; elsewhere it is a size itself (t5-base)


@dataclass(frozen=True)
class Published:
    """A published model: the repository its config.json stands in, its number of parameters, and its config.

    `dtype` is that of the stored weights, as the configuration of a training calls it.
    """

    source: str
    parameters: int
    config: dict[str, Any]
    dtype: Literal["fp32", "bf16"] = "fp32"
    also: tuple[str, ...] = ()

    @property
    def is_denoiser(self) -> bool:
        """True for a model of `diffusers`, whose config names its class."""
        return "_class_name" in self.config

    @property
    def owner(self) -> str:
        return self.source.partition("/")[0]


@cache
def published() -> dict[str, Published]:
    """All of them, by name."""
    table = tomllib.loads(files("tightfit.models").joinpath("published.toml").read_text("utf-8"))
    return {name: _entry(**entry) for name, entry in table.items()}


def find_published(name: str) -> Published | None:
    """The model that a name means, or that has its shape; None if it is not in the table.

    Case and separators do not matter (`Llama 3.1 8B`, `llama_3_1_8b`), nor do words such as Instruct. Of a repository
    (`meta-llama/Llama-3.1-8B-Instruct`) the owner has to be the model's own.
    """
    owner, slash, repository = name.rpartition("/")
    known = _by_words().get(_words(repository))
    return known if known is not None and (not slash or owner.lower() == known.owner.lower()) else None


def is_source(name: str, known: Published) -> bool:
    """True if a name is that of the model's repository, in any case."""
    return name.lower() == known.source.lower()


@cache
def _by_words() -> Mapping[tuple[str, ...], Published]:
    named: dict[tuple[str, ...], Published] = {}
    for key, known in published().items():
        for name in (key, *known.also, known.source.partition("/")[2]):
            named.setdefault(_words(name), known)
    return named


def _words(name: str) -> tuple[str, ...]:
    """The letters and the numbers of a name, one after the other."""
    return tuple(word for word in re.findall("[a-z]+|[0-9]+", _BASE.sub("", name.lower())) if word not in _NO_SHAPE)


def _entry(*, config: dict[str, Any], also: list[str] | None = None, **entry: Any) -> Published:
    return Published(config=_with_nulls(config), also=tuple(also or ()), **entry)


def _with_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: the fields that are null in config.json are listed by name."""
    return {k: v for k, v in config.items() if k != "nulls"} | dict.fromkeys(config.get("nulls", ()))
