"""Two operators that ranks call together: parts become all parts, and what was computed for all is added up for each.
And functions of theirs with gradients.

They are functional, and give the same results when they are called again, so a lever may drop and recompute them. The
collectives of `torch.distributed` write into memory of their caller, and other ranks may have changed what they send.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightfit.runtime.internals import group_named

Changing = Callable[[Tensor], Tensor]
GATHERED, ADDED_UP = "tightfit.gather_parts.default", "tightfit.add_up_parts.default"

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_LIBRARY.define("gather_parts(Tensor part, int ranks, str group) -> Tensor")
_LIBRARY.define("add_up_parts(Tensor parts, int ranks, str group) -> Tensor")


def gather_parts(part: Tensor, ranks: int, group: str) -> Tensor:
    """The parts of all ranks, (ranks, *part.shape), in the order of their numbers. `part` is contiguous."""
    return torch.ops.tightfit.gather_parts.default(part, ranks, group)


def add_up_parts(parts: Tensor, ranks: int, group: str) -> Tensor:
    """The sum over all ranks of what each has for this one: of (ranks, ...), contiguous, the shape without `ranks`."""
    return torch.ops.tightfit.add_up_parts.default(parts, ranks, group)


def _gather(part: Tensor, ranks: int, group: str) -> Tensor:
    import torch.distributed as dist

    parts = part.new_empty((ranks, *part.shape))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the old name, before torch 2.13
    gather(parts.view(-1), part.view(-1), group=group_named(group))
    return parts


def _add_up(parts: Tensor, ranks: int, group: str) -> Tensor:
    import torch.distributed as dist

    own = parts.new_empty(parts.shape[1:])
    add_up = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    add_up(own.view(-1), parts.view(-1), group=group_named(group))
    return own


for key in ("CPU", "CUDA"):
    _LIBRARY.impl("gather_parts", _gather, key)
    _LIBRARY.impl("add_up_parts", _add_up, key)


@torch.library.register_fake("tightfit::gather_parts", lib=_LIBRARY)
def _gathered(part: Tensor, ranks: int, group: str) -> Tensor:
    return part.new_empty((ranks, *part.shape))


@torch.library.register_fake("tightfit::add_up_parts", lib=_LIBRARY)
def _added_up(parts: Tensor, ranks: int, group: str) -> Tensor:
    return parts.new_empty(parts.shape[1:])


class _Exchanged(torch.autograd.Function):
    """One function of a tensor, and another one of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0]), None, None


def exchanged(tensor: Tensor, there: Changing, back: Changing) -> Any:
    """The result of `there`, whose gradient `back` makes to that of the tensor. Both may send messages."""
    return _Exchanged.apply(tensor, there, back)
