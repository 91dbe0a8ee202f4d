"""Models by what `--model` says: a folder, a config.json, a YAML, a preset, a published model, module:function, or a
name on the hub.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from tightfit.cli.question import ATTENTIONS, OF_THE_DECODER
from tightfit.errors import InputError, ModelError, TightfitError, said_by
from tightfit.models.adapters import ADAPTER_CONFIG, add_adapter
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.models.dtypes import WEIGHT_DTYPES, convert_weights
from tightfit.models.loading import build_model, without_weights
from tightfit.models.pretrained import find, set_attention
from tightfit.models.published import find_published, published
from tightfit.models.quantised_record import is_quantised
from tightfit.models.saving import CONFIG_FILE, MODEL_TYPE, load_model
from tightfit.runtime.users_code import object_named
from tightfit.step import Batch
from tightfit.tracing.build import build_dry
from tightfit.training.config import AdapterConfig, ModelConfig, PretrainedModel, load_config

SEED = 0  # of new weights
SDPA = "sdpa"
KEY = "model.path"  # which errors about a configuration name


class Built(NamedTuple):
    """A model, and the batch that a function gave along with it."""

    model: nn.Module
    batch: Batch | None = None


class HeldAs(NamedTuple):
    """How a model is to be held: the dtype of its weights (None: fp32, or as its function made it), adapters on it,
    its attention, and keys of the reference decoder that are laid over its own. With `as_published`, None is the dtype
    in which a model of transformers is published, as it is run and not trained.
    """

    dtype: str | None = None
    adapter: AdapterConfig | None = None
    attention: str | None = None
    shape: Mapping[str, int] = MappingProxyType({})
    as_published: bool = False


AS_IT_IS = HeldAs()


def build(source: str, *, dry: bool, held: HeldAs = AS_IT_IS) -> Built:
    """The model that `source` names, held in that way; dry ones have shapes and no weights. Raises `ModelError`."""
    try:
        return _built(source, dry, held)
    except ModelError as error:
        if KEY not in str(error):
            raise
        raise ModelError(str(error).replace(KEY, "--model")) from error  # what was written, not a configuration's key


def _built(source: str, dry: bool, held: HeldAs) -> Built:
    path = Path(source)
    if is_quantised(path):
        return Built(_quantised(path, held))
    section = described(source)
    if isinstance(section, DecoderConfig):
        section = _decoder(section, held)
        return Built(_made(lambda: _adapted(build_model(section, seed=SEED), held), dry))
    if section is not None:
        return Built(_of_section(_laid_over(section, held), dry))
    if path.exists() and _is_own(path):
        return Built(_as_held(load_model(path).train(), held))
    if not path.exists() and ":" in source and find_published(source) is None:
        return _called(source, dry, held)
    return Built(_pretrained(source, dry, held))


def _quantised(path: Path, held: HeldAs) -> nn.Module:
    """A quantised model with its weights: what memory they take is theirs to say."""
    if held.dtype is not None or held.adapter is not None:
        raise InputError(
            f"--model {str(path)!r} is quantised: its weights are as they were written, leave out --dtype and --adapter"
        )
    return _as_held(load_model(path), held)


def described(source: str) -> ModelConfig | None:
    """The section `model` that a preset or a YAML stands for; None for any other source."""
    path = Path(source)
    if source in PRESETS:
        return DecoderConfig(**PRESETS[source])
    return load_config(source).model if path.suffix in (".yaml", ".yml") and path.is_file() else None


def _decoder(section: DecoderConfig, held: HeldAs) -> DecoderConfig:
    """The reference decoder's section with the keys that are given."""
    changed: dict[str, Any] = dict(held.shape)
    if held.dtype is not None:
        changed["dtype"] = held.dtype
    if held.attention is not None:
        if held.attention not in (SDPA, OF_THE_DECODER):
            raise InputError(
                f"--attention {held.attention} is for models of transformers, and this is the reference decoder: "
                f"choose {SDPA} or {OF_THE_DECODER}"
            )
        changed["attention"] = held.attention
    return replace(section, **changed)


def _laid_over(section: PretrainedModel, held: HeldAs) -> PretrainedModel:
    """The section of a model of `transformers` with what is given."""
    if held.attention == OF_THE_DECODER:
        raise InputError(
            f"--attention {OF_THE_DECODER} is the reference decoder's, and this is a model of transformers: choose "
            f"{', '.join(ATTENTIONS)}"
        )
    given = {"dtype": held.dtype, "adapter": held.adapter, "attention": held.attention}
    changed = {key: value for key, value in given.items() if value is not None}
    if held.adapter is not None and held.adapter.base in WEIGHT_DTYPES:
        changed["dtype"] = "auto"  # its base says the dtype
    return section.model_copy(update=changed)


def _of_section(section: ModelConfig, dry: bool) -> nn.Module:
    asked = without_weights(section) if dry else section
    return _made(lambda: build_model(asked, seed=SEED, any_task=True), dry)


def _pretrained(source: str, dry: bool, held: HeldAs) -> nn.Module:
    """A model of `transformers`; with new weights where there are none to load, or none are wanted."""
    known = None if Path(source).exists() else find_published(source)
    name = source if known is None else known.source
    try:
        has_weights = known is None and find(name).has_weights
    except ModelError as error:
        near = difflib.get_close_matches(source.lower(), [*PRESETS, *published()], n=1)
        hint = (
            f"did you mean {near[0]}?" if near else f"presets are {', '.join(PRESETS)}, and docs/names.md lists models"
        )
        raise ModelError(
            f"--model {source!r}: no such folder, file, preset, module:function or name on the hub: {hint}"
        ) from error
    section = _laid_over(PretrainedModel(path=name, dtype="auto" if held.as_published else "fp32"), held)
    return _of_section(section if has_weights else without_weights(section), dry)


def _as_held(model: nn.Module, held: HeldAs) -> nn.Module:
    """A model that is there already, held as asked: a run's, or one that a function made."""
    if held.attention is not None:
        set_attention(model, held.attention)
    if held.dtype in WEIGHT_DTYPES:
        convert_weights(model, WEIGHT_DTYPES[held.dtype])
    return _adapted(model, held)


def _adapted(model: nn.Module, held: HeldAs) -> nn.Module:
    if held.adapter is None:
        return model
    if held.adapter.base in WEIGHT_DTYPES:
        convert_weights(model, WEIGHT_DTYPES[held.adapter.base])
    return add_adapter(model, held.adapter).train()


def _made(factory: Callable[[], nn.Module], dry: bool) -> nn.Module:
    return build_dry(factory) if dry else factory()


def _is_own(path: Path) -> bool:
    """True if a folder holds a decoder that was trained here, or adapters."""
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


def _called(source: str, dry: bool, held: HeldAs) -> Built:
    """The result of the user's function: a module, or a module and a batch."""
    function = object_named(source, "--model", callable, "a function that returns a module", ModelError)
    kept: list[Any] = []

    def factory() -> nn.Module:
        result = function()
        model, *rest = result if isinstance(result, tuple) else (result,)
        kept.extend(rest)
        if not isinstance(model, nn.Module):
            raise ModelError(f"--model {source}: returned a {type(model).__name__}, wanted a torch.nn.Module")
        return _as_held(model, held)

    try:
        model = _made(factory, dry)
    except TightfitError:
        raise
    except Exception as error:  # the user's code may raise anything; the traceback stays on the chain
        raise ModelError(f"--model {source}: raised {said_by(error)}") from error
    return Built(model, kept[0] if kept else None)
