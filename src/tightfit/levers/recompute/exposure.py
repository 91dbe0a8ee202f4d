"""Notices when user code gets the memory of a tensor outside of PyTorch: by numpy, DLPack or a data pointer.

The dispatcher does not see writes into that memory. From then on the memory itself is the truth, so the value is held
instead of recomputed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tightfit.errors import RecomputeError
from tightfit.levers.recompute.values import (
    Root,
    alias,
    existing_root,
    expose,
    forget_root,
    has_plain_storage,
    held_product,
    product_of,
    set_product,
)


def product_in(tensor: torch.Tensor) -> Any:
    return product_of(tensor.untyped_storage()) if has_plain_storage(tensor) else None


def show(tensor: torch.Tensor) -> None:
    """Hold the original memory of a value for autograd: code outside of PyTorch may write into it, and autograd would
    have saved that memory.
    """
    if not has_plain_storage(tensor):
        return
    storage = tensor.untyped_storage()
    for product in (product_of(storage), held_product(storage)):
        if product is not None and product.shown is None:
            product.shown = Root(tensor)


def lose_sight(tensor: torch.Tensor, *, lasting: bool) -> None:
    """Expect writes from outside. Operators recorded so far keep the present content; later ones read the memory."""
    if isinstance(tensor, nn.Parameter) or not has_plain_storage(tensor):
        return  # autograd reads a parameter's memory in backward too, so recompute does the same
    storage = tensor.untyped_storage()
    root = existing_root(storage)
    if root is not None:
        # Roots of operators recorded so far promised the present content, and nobody will announce the write.
        root.hold_copy()
        forget_root(storage)
    set_product(storage, None)
    if lasting:
        expose(storage)


def notice_alias(region: str, tensor: torch.Tensor) -> None:
    """The user has an array that shares the memory, with an unknown lifetime."""
    show(tensor)
    lose_sight(tensor, lasting=True)


def notice_pointer(region: str, tensor: torch.Tensor) -> None:
    """A kernel is launched from Python: each launch asks for the data pointer again."""
    show(tensor)
    lose_sight(tensor, lasting=False)


def notice_data(region: str, tensor: torch.Tensor) -> None:
    """The user has an alias (`.data`) whose writes the dispatcher sees, and autograd does not count."""
    show(tensor)
    if has_plain_storage(tensor):
        alias(tensor.untyped_storage())


def refuse_exchange(region: str, tensor: torch.Tensor) -> None:
    if product_in(tensor) is not None:
        raise RecomputeError(
            f"{region}: the block assigns to `.data` of a tensor of {tuple(tensor.shape)} that it computed, "
            "which cannot be recomputed: leave this block out"
        )


_DATA: Any = torch.Tensor.data
NOTICES = {
    torch.Tensor.numpy: notice_alias,
    torch.Tensor.__array__: notice_alias,
    torch.Tensor.__dlpack__: notice_alias,
    torch.Tensor.data_ptr: notice_pointer,
    _DATA.__get__: notice_data,
    _DATA.__set__: refuse_exchange,
}

# These modules call `torch.overrides.has_torch_function`, and use other kernels if a function mode is active. They do
# not expose memory, so a block that contains one runs without the mode below.
TAKES_ANOTHER_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class ExposureMode(TorchFunctionMode):
    """Watches one call of one block, and calls `exposed` when a tensor's memory is handed out."""

    def __init__(self, region: str, exposed: Callable[[], None]):
        super().__init__()
        self.region = region
        self.exposed = exposed

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        notice = NOTICES.get(func)
        if notice is not None:
            self.exposed()
            notice(self.region, args[0])
        return func(*args, **(kwargs or {}))
