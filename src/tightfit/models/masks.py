"""Masks that keep weights at zero through a training: their file, and their place in a model.

A mask is a buffer of its weight's module, so that dry runs, checkpoints and measured peaks count it: a byte a weight.
It is in no state dict.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tightfit.errors import ModelError, why_unreadable
from tightfit.names import MASKS as MASKS_FILE
from tightfit.training.config.schema import ModelConfig, PretrainedModel

SUFFIX = "_removed"  # of the buffer beside a weight
_SHAPES, _FORMAT = "shapes", "tightfit masks: bits, 1 where a weight is zero, numpy.packbits"


def masks_bytes(removed: Mapping[str, Tensor]) -> bytes:
    """The contents of masks.safetensors: a bit for each weight, 1 where it is zero."""
    packed = {name: torch.from_numpy(np.packbits(mask.cpu().numpy())) for name, mask in sorted(removed.items())}
    shapes = json.dumps({name: list(mask.shape) for name, mask in sorted(removed.items())})
    return save(packed, metadata={"format": _FORMAT, _SHAPES: shapes})


def read_masks(folder: str | Path) -> dict[str, Tensor]:
    """The masks in a folder by the names of their weights; empty where it has none. Raises `ModelError`."""
    path = Path(folder) / MASKS_FILE
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = json.loads((file.metadata() or {})[_SHAPES])
            return {name: _unpacked(file.get_tensor(name), tuple(shape)) for name, shape in shapes.items()}
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: holds no masks: {why_unreadable(error)}: prune the model again") from error


def _unpacked(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = int(np.prod(shape))
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).reshape(shape).astype(bool))


def source_masks(section: ModelConfig) -> dict[str, Tensor]:
    """The masks beside the weights that the section `model` names; empty for new weights. Raises `ModelError` for
    masks under adapters, whose merge would fill the zeros.
    """
    if not isinstance(section, PretrainedModel) or section.random_init:
        return {}
    removed = read_masks(section.path)
    if removed and section.adapter is not None:
        raise ModelError(
            f"model.path {section.path!r} has a {MASKS_FILE}, and model.adapter would fill its zeros when it is "
            "merged: leave the adapter out, or remove the file to give the masks up"
        )
    return removed


def put_masks(model: nn.Module, removed: Mapping[str, Tensor], *, dry: bool = False) -> None:
    """Give a model masks, by the names of its weights, and set those weights to zero; a dry model has no numbers.

    Raises `ModelError` for a name or a shape that is not the model's.
    """
    parameters = dict(model.named_parameters())
    for name, mask in removed.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != mask.shape:
            found = "no such weight" if parameter is None else f"the shape {tuple(parameter.shape)}"
            raise ModelError(
                f"{MASKS_FILE} has a mask {tuple(mask.shape)} for {name}, and the model has {found}: the masks are of "
                "another model, remove the file or prune again"
            )
        path, _, own = name.rpartition(".")
        model.get_submodule(path).register_buffer(own + SUFFIX, mask.to(parameter.device), persistent=False)
    if not dry:
        enforce_masks(model)


def drop_masks(model: nn.Module) -> None:
    """Give the masks of a model up. Its weights stay as they are."""
    for name in masks_of(model):
        path, _, own = name.rpartition(".")
        delattr(model.get_submodule(path), own + SUFFIX)


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """The masks in force, by the names of their weights."""
    return {name: mask for name, _, mask in _masked(model)}


@torch.no_grad()
def enforce_masks(model: nn.Module) -> None:
    """Set the masked weights of a model to zero again, after an optimizer has moved them. Allocates nothing."""
    for _, weight, mask in _masked(model):
        weight.masked_fill_(mask, 0)


def _masked(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith(SUFFIX) and isinstance(getattr(module, name.removesuffix(SUFFIX), None), nn.Parameter):
                own = name.removesuffix(SUFFIX)
                yield f"{path}.{own}".lstrip("."), getattr(module, own), buffer
