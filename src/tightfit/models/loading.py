"""Models from their configuration: the reference decoder, or a language model from `transformers`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from tightfit.errors import ModelError
from tightfit.models.adapters import ADAPTER_CONFIG, add_adapter
from tightfit.models.decoder import Decoder
from tightfit.models.dtypes import WEIGHT_DTYPES
from tightfit.models.own import CONFIG_FILE, decoder_config, is_own, load_decoder, stated_dtype
from tightfit.models.pretrained import build_pretrained, find, stored_dtype
from tightfit.models.quantised_record import refuse_quantised
from tightfit.training.config.schema import ModelConfig, PretrainedModel


def build_model(config: ModelConfig, *, seed: int | None = None, any_task: bool = False) -> nn.Module:
    """The model that the section `model` describes, in training mode, on the CPU; under adapters if it has any. Its
    weights have the dtype that the section says (`weights_dtype`).

    `model.path` may also name a run of the reference decoder. `seed` makes new weights reproducible and leaves torch's
    own random state as it was. `any_task` allows models that no training here has data for: of images, of speech.
    Raises `ModelError` where the model is missing or is no language model, or a package is missing.
    """
    with _seeded(seed):
        model = _saved_model(config, any_task) if isinstance(config, PretrainedModel) else Decoder(config)
        if isinstance(config, PretrainedModel) and config.adapter is not None:
            model = add_adapter(model, config.adapter)
    return model.train()


def _saved_model(config: PretrainedModel, any_task: bool) -> nn.Module:
    """The model that `model.path` names: what a run of ours left, or one of `transformers`."""
    folder = Path(config.path)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"model.path {config.path!r} holds adapters and no model: give the folder of the model that they are for, "
            "and model.adapter for new ones"
        )
    refuse_quantised(folder, f"model.path {config.path!r}")
    dtype = weights_dtype(config)
    if not is_own(folder):
        return build_pretrained(config, WEIGHT_DTYPES[dtype], any_task=any_task)
    if config.attention != "auto":
        raise ModelError(
            f"model.attention {config.attention}: model.path {config.path!r} is a reference decoder, whose own "
            "configuration says its attention: leave it out"
        )
    return Decoder(decoder_config(folder, dtype)) if config.random_init else load_decoder(folder, dtype)


def weights_dtype(config: PretrainedModel) -> str:
    """`fp32` or `bf16`: the dtype of the weights that the section `model` asks for, before any are quantised.

    Where the checkpoint decides, bf16 stays bf16, and all else is read as fp32: the range of fp16 is too small for
    weights that are trained. Raises `ModelError`.
    """
    if config.adapter is not None and config.adapter.base in WEIGHT_DTYPES:
        return config.adapter.base
    if config.adapter is not None and config.dtype == "auto":
        return "fp32"
    if config.dtype != "auto":
        return config.dtype
    if is_own(Path(config.path)):
        return stated_dtype(vars(decoder_config(Path(config.path))))
    if config.random_init or config.gguf_file is not None:
        return "fp32"
    stored = stored_dtype(find(config.path))
    return "bf16" if stored == torch.bfloat16 else "fp32"


def without_weights(config: ModelConfig) -> ModelConfig:
    """The section for a dry run: the same model and dtype, with no weights to read."""
    if not isinstance(config, PretrainedModel):
        return config
    dtype = config.dtype if config.adapter is not None else weights_dtype(config)
    return config.model_copy(update={"random_init": True, "dtype": dtype})


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of the model's input embedding; None where it has no such thing."""
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else getattr(model, "embedding", None)
    return getattr(embedding, "num_embeddings", None)


def position_limit(model: nn.Module) -> int | None:
    """The longest sequence the model's positions reach, in tokens; None where its config names none."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", config)  # of a model that reads images too
    # Whisper's decoder has a name of its own for it.
    return getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Random numbers of the CPU, where models are built, from `seed` inside and as they were afterwards."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
