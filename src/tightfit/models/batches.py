"""A batch of the right shapes for a model about which only a question is asked: tokens, images or speech."""

from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import InputError, ModelError
from tightfit.models.loading import position_limit, vocabulary_size
from tightfit.step import Batch, TokenBatch


def batch_of(model: nn.Module, size: int, length: int | None, length_key: str, *, otherwise: int) -> Batch:
    """A batch for a training step of the model, with labels.

    `length` counts tokens: of the text (None: `otherwise`), or of what is said in speech (None: as many as the model
    takes). `length_key` is what errors call it. Raises `InputError` for a length that the model cannot take, and
    `ModelError` for a model that takes none of these.
    """
    takes = getattr(model, "main_input_name", "input_ids")
    if takes == "pixel_values":
        return _images(model, size, length, length_key)
    if takes == "input_features" and hasattr(model.config, "num_mel_bins"):
        return _speech(model, size, length, length_key)
    if length is None:
        return tokens(model, size, otherwise, f"the default {length_key}")
    return tokens(model, size, length, length_key)


def tokens(model: nn.Module, size: int, length: int, length_key: str) -> TokenBatch:
    """A batch of token ids that the model has embeddings and positions for."""
    _demand_positions(model, length, length_key)
    vocabulary = vocabulary_size(model) or _first_embedding(model)
    if vocabulary is None:
        raise ModelError(
            f"{type(model).__name__} has no embedding to make token ids for: let the function return (model, batch), "
            "the batch a dict or a tuple of tensors"
        )
    return TokenBatch(size, length, vocabulary)


def _images(model: nn.Module, size: int, length: int | None, length_key: str) -> dict[str, Tensor]:
    """Pictures of the size that the model was made for, and a class for each."""
    config: Any = model.config
    pixels = getattr(config, "image_size", None)
    height, width = pixels if isinstance(pixels, list | tuple) else (pixels, pixels)
    if not isinstance(height, int) or not isinstance(width, int):
        raise ModelError(
            f"{type(model).__name__} takes images, and its config names no image_size: name a function that returns "
            "(model, batch), module:function"
        )
    if length is not None:
        raise InputError(
            f"{length_key} {length} is for models that read tokens: {type(model).__name__} takes images of {height} x "
            f"{width} pixels, leave it out"
        )
    labels = torch.arange(size) % max(1, config.num_labels)
    return {"pixel_values": _floats(model, size, config.num_channels, height, width), "labels": labels}


def _speech(model: nn.Module, size: int, length: int | None, length_key: str) -> dict[str, Tensor]:
    """Spectrograms of the length that the encoder takes (30 seconds), and the tokens of what is said."""
    config: Any = model.config
    length = int(config.max_target_positions) if length is None else length
    _demand_positions(model, length, length_key)
    frames = 2 * config.max_source_positions  # the second convolution of the encoder has a stride of 2
    labels = TokenBatch(size, length, config.vocab_size).tensors()["labels"]
    return {"input_features": _floats(model, size, config.num_mel_bins, frames), "labels": labels}


def _floats(model: nn.Module, *shape: int) -> Tensor:
    """Numbers in the dtype of the weights: a step without autocast multiplies them."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) % 255 / 255).view(shape).to(dtype)


def _demand_positions(model: nn.Module, length: int, length_key: str) -> None:
    positions = position_limit(model)
    if positions is not None and length > positions:
        raise InputError(
            f"{length_key} {length} is longer than the {positions} positions of {type(model).__name__}: give at most "
            f"{positions}"
        )


def _first_embedding(model: nn.Module) -> int | None:
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
