"""Wraps a model in DDP or FSDP2: the plain recipe of both, which predictions and trainings share."""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tightfit.errors import ModelError
from tightfit.ranks.world import DDPSettings
from tightfit.runtime.module_paths import module_at
from tightfit.step import AUTOCAST_DTYPES, Precision


def in_ddp(model: nn.Module, settings: DDPSettings | None = None) -> nn.Module:
    """The model in DDP, by default with PyTorch's settings. All ranks have the same weights already."""
    settings = settings or DDPSettings()
    options = {name: value for name, value in settings.own.items() if name != "no_sync"}
    engine: Any = nn.parallel.DistributedDataParallel
    if "forward_sync_buffers" in inspect.signature(engine).parameters and "broadcast_buffers" in options:
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")  # the new name, in torch 2.13
    wrapped = engine(model, init_sync=False, **options)
    if not settings.no_sync:  # the loop adds up the gradients of every micro-batch
        wrapped.no_sync = nullcontext
    return wrapped


def settings_of_ddp(wrapped: nn.parallel.DistributedDataParallel) -> DDPSettings:
    """The settings of a model in DDP. Raises `ModelError` for what no rank is played with."""
    ddp: Any = wrapped
    if ddp._comm_hooks:
        raise ModelError(
            "the model is in DistributedDataParallel with a communication hook, whose memory is not predicted: train "
            "without the hook, or without the budget"
        )
    if ddp.mixed_precision is not None:
        raise ModelError(
            "the model is in DistributedDataParallel with mixed_precision, whose memory is not predicted: use autocast"
        )
    cap = None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / (1 << 20)
    return DDPSettings(
        bucket_cap_mb=cap,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        broadcast_buffers=ddp.broadcast_buffers,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
    )


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
