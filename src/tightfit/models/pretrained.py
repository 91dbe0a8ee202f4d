"""Models from `transformers`: a local folder, a config.json, a published model by its name, or one on the hub."""

import difflib
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from tightfit.errors import ModelError
from tightfit.models.converted import finds_no_room, loaded_in_file
from tightfit.models.diffusion import CLASS, build_denoiser, is_denoiser
from tightfit.models.published import Published, find_published, is_source, published
from tightfit.names import MASKS
from tightfit.training.config.schema import PretrainedModel

FLASH = "flash_attention_2"
OLDEST = (8, 0)  # the compute capability that it needs

LONGEST = 300  # characters of what transformers says
INSTALL_HINT = "pip install 'tightfit[hf]'"
TASKS = ("SpeechSeq2Seq", "ImageClassification")  # of models that are no language models, as transformers calls them
MAPPINGS = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "SpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}
SECONDS = 5  # how long the hub may take to answer before it counts as out of reach


def build_pretrained(
    config: PretrainedModel, dtype: torch.dtype = torch.float32, *, any_task: bool = False
) -> nn.Module:
    """A language model of `transformers`, decoder-only or encoder-decoder, with its weights or new ones, in a dtype.

    With `any_task` also a model that reads images or speech (`TASKS`). Raises `ModelError` where there is no such
    model, where it is no language model, or a package is missing.
    """
    source = find(config.path)
    if config.gguf_file is None and not config.random_init and not source.has_weights:
        named = "" if source.published is None else f", or name the repository {source.published.source}"
        raise ModelError(
            f"model.path {config.path!r} is a config without weights: set model.random_init to true{named}"
        )
    transformers = transformers_package()
    with _one_line(config.path):
        if config.random_init:
            model = _new(transformers, source, config, dtype, any_task)
        else:
            model = _loaded(transformers, source, config, dtype, any_task)
    if not is_denoiser(model):
        # A cache of keys and values is of no use in training, and recomputing a block would append to it twice.
        model.config.use_cache = False
    return model


def build_described(name: str, fields: Mapping[str, Any]) -> nn.Module:
    """A language model of `transformers` with new fp32 weights, from the fields of a config.json that errors call
    `name`. No file and no hub is asked. Raises `ModelError`.
    """
    transformers = transformers_package()
    with _one_line(name):
        source = ModelSource(name, Published(source=name, parameters=0, config=dict(fields)), has_weights=False)
        model = _new(transformers, source, PretrainedModel(path=name), torch.float32, any_task=False)
    model.config.use_cache = False
    return model


@contextmanager
def _one_line(path: str) -> Iterator[None]:
    """An error of `transformers` about a model, as a `ModelError` that names it."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except ImportError as error:
        raise ModelError(f"model.path {path!r} needs a package that is not installed: {_line(error)}") from error
    except (RuntimeError, MemoryError) as error:  # also where the weights find no room on this machine
        raise ModelError(f"model.path {path!r} cannot be built: {_line(error)}") from error
    except StrictDataclassError as error:
        raise ModelError(f"model.path {path!r}: its config holds what cannot be: {_line(error)}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model.path {path!r} is not a language model: {_line(error)}") from error


@dataclass(frozen=True)
class ModelSource:
    """Where a model's configuration comes from: a path, a repository of the hub, or the table of published ones."""

    name: str
    published: Published | None = None
    is_local: bool = True
    has_weights: bool = True

    def config(self, transformers: Any) -> Any:
        """The configuration, an object of `transformers`."""
        if self.published is not None:
            return transformers.AutoConfig.for_model(**self.published.config)
        return self.fetched(transformers.AutoConfig.from_pretrained)

    def fetched(self, load: Callable[..., Any], **options: Any) -> Any:
        """`load` from what is on this machine; from the hub if it is not here, and the hub can be reached."""
        try:
            return load(self.name, local_files_only=True, **options)
        except OSError:
            if self.is_local:
                raise
        demand_hub(self.name)
        return load(self.name, **options)


def find(path: str) -> ModelSource:
    """The source that `model.path` names. Raises `ModelError` where it can be none."""
    if Path(path).exists():
        return ModelSource(path, has_weights=Path(path).is_dir())
    known = find_published(path)
    if known is not None and is_source(path, known):
        return ModelSource(known.source, known, is_local=False)
    if known is not None and "/" not in path:
        return ModelSource(path, known, has_weights=False)
    if path.count("/") == 1 and all(path.split("/")) and not path.startswith((".", "~")):
        return ModelSource(path, is_local=False)
    near = difflib.get_close_matches(path.lower(), published(), n=1)
    hint = f"did you mean {near[0]}?" if near else "give a local Hugging Face folder"
    raise ModelError(f"model.path {path!r}: no such file or folder: {hint}")


def demand_hub(name: str) -> None:
    """Raise `ModelError` unless the hub answers; its own client would try for the better part of a minute."""
    from huggingface_hub import constants

    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answered
    except OSError as error:
        raise ModelError(
            f"model.path {name!r}: no such folder, nothing of that name in the local cache, and "
            f"{constants.ENDPOINT} cannot be reached ({_line(error)}): give a local folder or a config.json"
        ) from error


def stored_dtype(source: ModelSource) -> torch.dtype | None:
    """The dtype of a checkpoint's weights, as its configuration says or else its first weights show; None where neither
    does. Raises `ModelError`.
    """
    if source.published is not None:
        return torch.bfloat16 if source.published.dtype == "bf16" else torch.float32
    stated = _configuration(source).dtype
    if stated is not None or not Path(source.name).is_dir():
        return stated
    for path in sorted(path for path in Path(source.name).glob("*.safetensors") if path.name != MASKS):
        with safe_open(path, framework="pt") as weights:
            kinds = [weights.get_slice(name).get_dtype() for name in weights.keys()]  # noqa: SIM118 - not a mapping
        return torch.bfloat16 if kinds and set(kinds) <= {"BF16"} else torch.float32
    return None


def transformers_config(path: str) -> Any:
    """The configuration in a folder, an object of `transformers` with every default. Raises `ModelError`."""
    return _configuration(find(path))


def _configuration(source: ModelSource) -> Any:
    try:
        return source.config(transformers_package())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model.path {source.name!r} is not a language model: {_line(error)}") from error


def _new(transformers: Any, source: ModelSource, section: PretrainedModel, dtype: torch.dtype, any_task: bool) -> Any:
    if source.published is not None and source.published.is_denoiser:
        if not any_task:
            name = source.published.config[CLASS]
            raise ValueError(f"it is a {name}, which your own loop trains under tightfit.plan")
        return build_denoiser(source.published.config, dtype)
    config = source.config(transformers)
    automatic, kind = _auto_class(transformers, config, any_task)
    return automatic.from_config(config, dtype=dtype, **_attention(section, kind))


def _loaded(
    transformers: Any, source: ModelSource, section: PretrainedModel, dtype: torch.dtype, any_task: bool
) -> Any:
    if section.gguf_file:
        options = {"gguf_file": section.gguf_file}
        if section.attention != "auto":
            options["attn_implementation"] = section.attention
        return source.fetched(transformers.AutoModelForCausalLM.from_pretrained, dtype=dtype, **options)
    described = source.config(transformers)
    automatic, kind = _auto_class(transformers, described, any_task)
    options = _attention(section, kind)
    stored = stored_dtype(source) if Path(source.name).is_dir() else None
    if stored is not None and finds_no_room(source.name, stored, dtype):
        load = partial(source.fetched, automatic.from_pretrained, **options)
        return loaded_in_file(load, partial(automatic.from_config, described, **options), stored, dtype)
    return source.fetched(automatic.from_pretrained, dtype=dtype, **options)


def _attention(section: PretrainedModel, kind: Any) -> dict[str, str]:
    if section.attention == "auto":
        return {}
    demand_support(section.attention, kind)
    return {"attn_implementation": section.attention}


def _auto_class(transformers: Any, config: Any, any_task: bool = False) -> tuple[Any, Any]:
    """The automatic class that trains such a model (with encoder and decoder if it has both), and the model's own.

    Raises `ValueError` for others.
    """
    tasks = ["Seq2SeqLM" if getattr(config, "is_encoder_decoder", False) else "CausalLM"]
    for task in [*tasks, *(TASKS if any_task else ())]:
        known = getattr(transformers, MAPPINGS[task])
        if type(config) in known:
            return getattr(transformers, f"AutoModelFor{task}"), known[type(config)]
    raise ValueError(f"its config is of a {config.model_type}: name a function that returns it, module:function")


def trained_task(model: nn.Module) -> str | None:
    """The task that a model of `transformers` is trained for here: `CausalLM` or `Seq2SeqLM`; None for others."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):  # a diffusion model, or nobody's we know
        return None
    try:
        automatic, _ = _auto_class(transformers_package(), config)
    except ValueError:
        return None
    return automatic.__name__.removeprefix("AutoModelFor")


def transformers_package() -> Any:
    """The package, imported only where it is needed: that takes seconds. Raises `ModelError`."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"this model needs the package transformers: {INSTALL_HINT}") from error
    return transformers


def _line(error: Exception) -> str:
    """The error's text on one line, without the names of all architectures that transformers knows, nor those of its
    own exceptions.
    """
    text = " ".join(str(error).split())
    if (unknown := re.search(r"has model type `(.+?)` but Transformers does not recognize", text)) is not None:
        return _unknown_type(unknown[1])
    text = re.sub(r"^Class validation error for validator '\w+': (\w+Error: )?", "", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _unknown_type(name: str) -> str:
    """A line of advice about a `model_type` that the installed transformers does not know."""
    transformers = transformers_package()
    near = difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING), n=1)
    hint = f"did you mean {near[0]}? Else " if near else ""
    return (
        f"transformers {transformers.__version__} knows no model_type {name!r}: {hint}update it (pip install --upgrade "
        "transformers)"
    )


def demand_support(name: str, kind: Any) -> None:
    """Raise `ModelError` where a class of `transformers` does not have an attention."""
    supported = {"eager": True, "sdpa": getattr(kind, "_supports_sdpa", False), FLASH: _supports_flash(kind)}
    if not supported[name]:
        others = [other for other, is_supported in supported.items() if is_supported]
        raise ModelError(f"attention {name!r}: {kind.__name__} does not have it: choose {' or '.join(others)}")


def set_attention(model: nn.Module, name: str) -> None:
    """Change the attention of a model that exists. Raises `ModelError` if its attention has no names."""
    changed: Any = model
    if not hasattr(model, "set_attn_implementation"):
        raise ModelError(
            f"attention {name!r}: a {type(model).__name__} is no model of transformers, whose attention has names: "
            "leave it out"
        )
    demand_support(name, type(model))
    changed.set_attn_implementation(name)


def _supports_flash(kind: Any) -> bool:
    compatible = getattr(kind, "_compatible_flash_implementations", None)
    return getattr(kind, "_supports_flash_attn", False) and (compatible is None or FLASH in compatible)
