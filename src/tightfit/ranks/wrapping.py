"""Wraps a model in DDP or FSDP2: the plain recipe of both, which predictions and trainings share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tightfit.runtime.module_paths import module_at
from tightfit.step import AUTOCAST_DTYPES, Precision


def in_ddp(model: nn.Module) -> nn.Module:
    """The model in DDP with PyTorch's settings. All ranks have the same weights already."""
    return nn.parallel.DistributedDataParallel(model, init_sync=False)


def in_fsdp2(
    model: nn.Module,
    blocks: Sequence[str],
    mesh: Any,
    *,
    precision: Precision = "fp32",
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """The model itself, sharded in place: each block by itself, then all that is left together.

    `reshard_after_forward` None is FSDP2's own default: blocks free their gathered weights after forward, and what is
    left keeps them until its backward.
    """
    from torch.distributed.fsdp import fully_shard

    policy = mixed_precision(precision)
    for path in blocks:
        fully_shard(module_at(model, path), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return model


def mixed_precision(precision: Precision) -> Any:
    """FSDP2's policy for a precision: gathered weights and activations in 16 bits, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
