"""Models that FSDP2 has sharded, in real processes: a rank's rows of a tensor, and whole tensors again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tightfit.runtime.module_paths import named_modules


class Rows(NamedTuple):
    """The rows of a tensor that a rank holds, where they lie: the number of the first one, and their memory."""

    first: int
    memory: Tensor


def rows_of_shard(tensor: Tensor) -> Rows:
    """This rank's rows of a sharded tensor; none on the last ranks where there are few."""
    shard: Any = tensor.detach()
    mesh = shard.device_mesh
    length, size = shard.shape[0], mesh.size(-1)  # shards are along the last dimension, copies of them along others
    each = -(-length // size)
    return Rows(min(mesh.get_local_rank(mesh.ndim - 1) * each, length), shard.to_local())


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor as a whole, on every rank; all ranks call it in the same order. Any other one as it is."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def free_gathered(model: nn.Module) -> None:
    """Let go of the weights that a forward without backward has left gathered: the root keeps its own."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def without_messages(model: nn.Module) -> Iterator[None]:
    """A context in which backward exchanges no gradients: each rank adds up its own, of whole weights."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for _, module in named_modules(model) if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            module.set_requires_gradient_sync(True, recurse=False)
