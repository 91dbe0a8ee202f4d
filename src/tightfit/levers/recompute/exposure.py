"""Notices when the user's code reaches behind PyTorch to the memory of a tensor: numpy, DLPack, a data pointer.

The dispatcher does not see what is written that way, so from then on the memory is the truth: the value is held
instead of recomputed.
"""

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
    product_of,
    set_product,
)

# These ask whether somebody watches the functions they call, and then compute with other kernels. They show their
# memory to nobody, so a block with one of them goes without the watch.
TAKES_ANOTHER_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class ExposureObserver(TorchFunctionMode):
    """Stands around one call of one block (a region)."""

    def __init__(self, region: str):
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        notice = _NOTICES.get(func)
        if notice is not None:
            notice(self.region, args[0])
        return func(*args, **kwargs) if kwargs else func(*args)


def product_in(tensor: torch.Tensor) -> Any:
    return product_of(tensor.untyped_storage()) if has_plain_storage(tensor) else None


def show(tensor: torch.Tensor) -> None:
    """Somebody may write into what autograd would have held: let it hold that memory, as it would have."""
    product = product_in(tensor)
    if product is not None and product.shown is None:
        product.shown = Root(tensor)


def lose_sight(tensor: torch.Tensor, *, lasting: bool) -> None:
    """Writes from outside may follow: what was read so far keeps its value, what comes is read from memory."""
    if isinstance(tensor, nn.Parameter) or not has_plain_storage(tensor):
        return  # autograd and recompute read a parameter where it lies, then as now
    storage = tensor.untyped_storage()
    root = existing_root(storage)
    if root is not None:
        root.hold_copy()
        forget_root(storage)
    set_product(storage, None)
    if lasting:
        expose(storage)


def notice_alias(region: str, tensor: torch.Tensor) -> None:
    """An array that shares the memory, for as long as the user likes."""
    show(tensor)
    lose_sight(tensor, lasting=True)


def notice_pointer(region: str, tensor: torch.Tensor) -> None:
    """What every kernel launched from Python asks for, at each launch."""
    show(tensor)
    lose_sight(tensor, lasting=False)


def notice_data(region: str, tensor: torch.Tensor) -> None:
    """An alias whose writes autograd does not count; the dispatcher sees them."""
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
_NOTICES = {
    torch.Tensor.numpy: notice_alias,
    torch.Tensor.__array__: notice_alias,
    torch.Tensor.__dlpack__: notice_alias,
    torch.Tensor.data_ptr: notice_pointer,
    _DATA.__get__: notice_data,
    _DATA.__set__: refuse_exchange,
}
