"""The lever `chunked_loss`: head and cross-entropy in one, the logits of some tokens at a time, on an unmodified
model.
"""

from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError
from tightfit.internals import without_dynamo
from tightfit.levers.deferred_logits import DeferredLogits, Recipe
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.region import FrugalForward


class DeferringForward(FrugalForward):
    """Stands in for the forward of a linear head: its product is deferred until somebody needs it."""

    def __init__(self, module: nn.Module, path: str, chunk_size: int | None):
        super().__init__(module, path)
        self.chunk_size = chunk_size

    @without_dynamo
    def __call__(self, hidden: torch.Tensor) -> Any:
        head = self.module
        assert isinstance(head, nn.Linear), "the lever is put on linear heads only"
        needs_grad = hidden.requires_grad or any(p.requires_grad for p in head.parameters(recurse=False))
        if not (torch.is_grad_enabled() and needs_grad):
            return self.original(hidden)
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return DeferredLogits.of(Recipe(hidden, head.weight, head.bias, self.chunk_size, autocast))


def apply_chunked_loss(model: nn.Module, head_path: str, chunk_size: int | None = None) -> Applied:
    """Compute the cross-entropy of `head_path`'s output without ever holding all logits.

    `chunk_size` is the number of tokens whose logits exist at a time; None leaves it to the operator. A model that
    does anything else with its logits gets them. Returns a handle with `undo()`. Raises `LeverError` if the path is
    no linear layer.
    """
    try:
        head = model.get_submodule(head_path)
    except AttributeError:
        raise LeverError(f"chunked loss: the model has no module {head_path!r}") from None
    if not isinstance(head, nn.Linear):
        raise LeverError(
            f"chunked loss: {head_path} is a {type(head).__name__}, wanted the nn.Linear that makes the logits"
        )
    if chunk_size is not None and chunk_size < 1:
        raise LeverError(f"chunked loss: chunk_size {chunk_size} is not at least 1")
    forward = DeferringForward(head, head_path, chunk_size)
    forward.install()
    return Applied([forward])
