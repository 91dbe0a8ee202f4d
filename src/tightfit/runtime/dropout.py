"""Switches dropout off and leaves everything else in training mode, batch statistics above all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_IDENTITIES = frozenset(
    {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
        *(torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_),
    }
)
_PLACE_OF_P = 4  # among the arguments of fused attention
# Modules whose mode decides nothing but dropout. Recurrent ones hand it to a kernel that no mode sees.
_ONLY_DROPOUT = (nn.modules.dropout._DropoutNd, nn.RNNBase)


class _NoDropout(TorchFunctionMode):
    """A context in which functions drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _IDENTITIES:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:_PLACE_OF_P], *([0.0] if len(args) > _PLACE_OF_P else []), *args[5:]), kwargs
            kwargs.update({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        elif func is F.multi_head_attention_forward:
            kwargs["training"] = False
        return func(*args, **kwargs)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A context in which neither the model's modules nor functions drop anything. Each module keeps its mode."""
    changed = [module for module in model.modules() if isinstance(module, _ONLY_DROPOUT) and module.training]
    for module in changed:
        module.training = False
    try:
        with _NoDropout():
            yield
    finally:
        for module in changed:
            module.training = True
