"""The scales of layers' inputs, measured on a text, for products of int8 numbers with fixed scales."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.models.mode import evaluating
from tightfit.ops.weights.torchao_weights import observer


@torch.no_grad()
def calibrated(model: nn.Module, paths: Sequence[str], rows: Tensor) -> dict[str, Tensor]:
    """The scale of the inputs of each linear layer at `paths`, by path: the largest number in them is 127 scales.

    `rows` (rows, tokens) int64 go through the model one at a time, so that it takes the memory of one. A layer that no
    token reaches (an expert) has no scale, and is missing.
    """
    observers = {path: observer() for path in paths}
    handles = [model.get_submodule(path).register_forward_pre_hook(_seen_by(one)) for path, one in observers.items()]
    try:
        with evaluating(model):
            for row in rows:
                model(input_ids=row[None])
    finally:
        for handle in handles:
            handle.remove()
    return {path: one.calculate_qparams()[0] for path, one in observers.items() if hasattr(one, "min_val")}


def unseen(scales: Mapping[str, Tensor], paths: Sequence[str]) -> dict[str, str]:
    """Why layers without a scale are left as they are."""
    return {path: "no token of the calibration reached it" for path in paths if path not in scales}


def _seen_by(one: Any) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        one(inputs[0])

    return hook
