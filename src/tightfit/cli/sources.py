"""Models by what `--model` says: a folder, a config.json, a YAML, a preset, a published model, module:function, or a
name on the hub.
"""

import difflib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tightfit.config import ModelConfig, PretrainedModel, load_config
from tightfit.errors import ModelError, TightfitError
from tightfit.models.adapters import ADAPTER_CONFIG
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.models.loading import build_model, without_weights
from tightfit.models.pretrained import find
from tightfit.models.published import published
from tightfit.models.saving import CONFIG_FILE, MODEL_TYPE, load_model
from tightfit.step import Batch
from tightfit.tracing.build import build_dry

SEED = 0  # of new weights


class Built(NamedTuple):
    """A model, and the batch that a function gave along with it."""

    model: nn.Module
    batch: Batch | None = None


def build(source: str, *, dry: bool, shape: Mapping[str, int] | None = None) -> Built:
    """The model that `source` names; dry ones have shapes and no weights. `shape` is laid over the keys of a reference
    decoder. Raises `ModelError`.
    """
    path = Path(source)
    section = described(source)
    if section is not None:
        if isinstance(section, DecoderConfig) and shape:
            section = replace(section, **shape)
        asked = without_weights(section) if dry else section
        return Built(_made(lambda: build_model(asked, seed=SEED), dry))
    if path.exists() and _is_own(path):
        return Built(load_model(path).train())
    if not path.exists() and ":" in source:
        return _called(source, dry)
    return Built(_pretrained(source, dry))


def described(source: str) -> ModelConfig | None:
    """The section `model` that a preset or a YAML stands for; None for any other source."""
    path = Path(source)
    if source in PRESETS:
        return DecoderConfig(**PRESETS[source])
    return load_config(source).model if path.suffix in (".yaml", ".yml") and path.is_file() else None


def _pretrained(source: str, dry: bool) -> nn.Module:
    """A model of `transformers`; with new weights where there are none to load, or none are wanted."""
    try:
        has_weights = find(source).has_weights
    except ModelError as error:
        near = difflib.get_close_matches(source.lower(), [*PRESETS, *published()], n=1)
        hint = f"did you mean {near[0]}?" if near else f"presets are {', '.join([*PRESETS, *published()])}"
        raise ModelError(
            f"--model {source!r}: no such folder, file, preset, module:function or name on the hub: {hint}"
        ) from error
    section = PretrainedModel(path=source, random_init=dry or not has_weights, dtype="fp32")
    return _made(lambda: build_model(section, seed=SEED), dry)


def _made(factory: Callable[[], nn.Module], dry: bool) -> nn.Module:
    return build_dry(factory) if dry else factory()


def _is_own(path: Path) -> bool:
    """Whether a folder holds a decoder that was trained here, or adapters."""
    if (path / ADAPTER_CONFIG).is_file():
        return True
    config = path / CONFIG_FILE
    if not config.is_file():
        return False
    try:
        raw = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):  # whoever loads it says what is wrong with it
        return False
    return isinstance(raw, dict) and raw.get("model_type") == MODEL_TYPE


def _called(source: str, dry: bool) -> Built:
    """What the user's function returns: a module, or a module and a batch."""
    function = _imported(source)
    kept: list[Any] = []

    def factory() -> nn.Module:
        result = function()
        model, *rest = result if isinstance(result, tuple) else (result,)
        kept.extend(rest)
        if not isinstance(model, nn.Module):
            raise ModelError(f"--model {source}: returned a {type(model).__name__}, wanted a torch.nn.Module")
        return model

    try:
        model = _made(factory, dry)
    except TightfitError:
        raise
    except Exception as error:  # the user's code may raise anything; the traceback stays on the chain
        raise ModelError(f"--model {source}: raised {type(error).__name__}: {error}") from error
    return Built(model, kept[0] if kept else None)


def _imported(source: str) -> Callable[[], Any]:
    """The function that `module:function` names, from the working folder or what is installed."""
    module_name, _, name = source.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ModelError(
            f"--model {source}: the module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "is not there" if function is None else f"is a {type(function).__name__}"
        raise ModelError(f"--model {source}: {name!r} {found} in {module_name}: name a function that returns a module")
    return function
