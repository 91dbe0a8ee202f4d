"""Models from their configuration: the reference decoder, or a causal language model from `transformers`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.config.schema import ModelConfig, PretrainedModel
from tightfit.errors import ModelError
from tightfit.models.decoder import Decoder

INSTALL_HINT = "pip install 'tightfit[hf]'"


def build_model(config: ModelConfig, *, seed: int | None = None) -> nn.Module:
    """The model that the section `model` describes, fp32, in training mode, on the CPU.

    `seed` makes new weights reproducible and leaves torch's own random state as it was. Raises `ModelError` where the
    folder is missing or is no causal language model, or a package is missing.
    """
    with _seeded(seed):
        model = _pretrained(config) if isinstance(config, PretrainedModel) else Decoder(config)
    return model.train()


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of the model's input embedding; None where it has no such thing."""
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else getattr(model, "embedding", None)
    return getattr(embedding, "num_embeddings", None)


def position_limit(model: nn.Module) -> int | None:
    """The longest sequence the model's positions reach, in tokens; None where its config names none."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Random numbers of the CPU, where models are built, from `seed` inside and as they were afterwards."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield


def _pretrained(config: PretrainedModel) -> nn.Module:
    path = Path(config.path)
    if not path.exists():
        raise ModelError(f"model.path {config.path!r}: no such file or folder: give a local Hugging Face folder")
    if path.is_file() and not config.random_init:
        raise ModelError(f"model.path {config.path!r} is a config without weights: set model.random_init to true")
    transformers = _transformers()
    try:
        model = _from_config(transformers, path) if config.random_init else _from_folder(transformers, path, config)
    except ImportError as error:
        raise ModelError(f"model.path {config.path!r} needs a package that is not installed: {_line(error)}") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"model.path {config.path!r} is not a causal language model: {_line(error)}") from error
    # A cache of keys and values is of no use in training, and recomputing a block would append to it twice.
    model.config.use_cache = False
    return model


def _from_folder(transformers: Any, path: Path, config: PretrainedModel) -> Any:
    # transformers would keep the dtype of the file, often bf16; training in mixed precision starts from fp32.
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, gguf_file=config.gguf_file, dtype=torch.float32, local_files_only=True
    )


def _from_config(transformers: Any, path: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _transformers() -> Any:
    """The package, imported only where it is needed: that takes seconds."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"model.path needs the package transformers: {INSTALL_HINT}") from error
    return transformers


def _line(error: Exception) -> str:
    """The error's text on one line."""
    return " ".join(str(error).split())
