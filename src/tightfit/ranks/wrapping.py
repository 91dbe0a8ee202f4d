"""Wraps a model in DDP or FSDP2: the plain recipe of both, which predictions and trainings share."""

import inspect
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.errors import ModelError
from tightfit.ranks.shards import without_messages
from tightfit.ranks.world import DDPSettings, Sharding, World
from tightfit.runtime.module_paths import module_at, named_modules
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
    """The settings of a model in DDP. Raises `ModelError` for what no rank is simulated with."""
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


def mesh_of(world: World, device_type: str, *, prefix: str = "") -> Any:
    """PyTorch's mesh of all ranks: of two dimensions where each node has a copy of the weights.

    `prefix` is of the names of its dimensions. PyTorch keeps what it knows of operators on distributed tensors by mesh,
    with the groups that a mesh had, and meshes of one shape and the same names are equal.
    """
    from torch.distributed.device_mesh import init_device_mesh

    names = [f"{prefix}{name}" for name in ("copies", "shards")[-len(world.mesh_shape) :]]
    return init_device_mesh(device_type, world.mesh_shape, mesh_dim_names=tuple(names))


def in_fsdp2(
    model: nn.Module,
    blocks: Sequence[str],
    mesh: Any,
    sharding: Sharding | None = None,
    *,
    precision: Precision = "fp32",
) -> nn.Module:
    """The model itself, sharded in place: each block, and what is apart, by itself; then all that is left together."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    sharding = sharding or Sharding()
    pinned = mesh.device_type == "cuda"
    alike: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision(precision),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if sharding.on_host else OffloadPolicy(),
    }
    for path in (*blocks, *sharding.apart):
        module = module_at(model, path)
        fully_shard(module, reshard_after_forward=_frees(path, module, sharding), **alike)
    fully_shard(model, reshard_after_forward=sharding.reshard_after_forward, **alike)
    _reduce_once(model, sharding)
    return model


def change_sharding(model: nn.Module, sharding: Sharding) -> None:
    """Have a model that is sharded in the same units do what it would do, had it been sharded so by `in_fsdp2`."""
    from torch.distributed.fsdp import FSDPModule

    for path, module in named_modules(model):
        if isinstance(module, FSDPModule) and path:  # the root keeps its own weights, whichever it is given
            module.set_reshard_after_forward(_frees(path, module, sharding) is not False, recurse=False)
    _reduce_once(model, sharding)


def _frees(path: str, module: nn.Module, sharding: Sharding) -> bool | None:
    # The loss may read the head's weight after forward, so only a table of embeddings is freed like a block.
    is_kept = path in sharding.apart and not isinstance(module, nn.Embedding)
    return False if is_kept else sharding.reshard_after_forward


def _reduce_once(model: nn.Module, sharding: Sharding) -> None:
    model.__dict__.pop("no_sync", None)
    if sharding.reduces_once:
        model.__dict__["no_sync"] = partial(without_messages, model)


LEAST_APART = 0.01  # of the model's elements: a smaller module is not worth messages of its own


def modules_apart(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """The paths of the large modules beside the blocks: those that hold weights themselves, and share none."""
    inside = {id(parameter) for path in blocks for parameter in module_at(model, path).parameters()}
    held = [(path, [*module.parameters(recurse=False)]) for path, module in named_modules(model) if path]
    holders = Counter(id(parameter) for _, parameters in held for parameter in parameters)
    least = LEAST_APART * sum(parameter.numel() for parameter in model.parameters())
    return tuple(
        path
        for path, parameters in held
        if sum(parameter.numel() for parameter in parameters) >= max(1, least)
        and all(holders[id(parameter)] == 1 and id(parameter) not in inside for parameter in parameters)
    )


def mixed_precision(precision: Precision) -> Any:
    """FSDP2's policy for a precision: gathered weights and activations in 16 bits, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
