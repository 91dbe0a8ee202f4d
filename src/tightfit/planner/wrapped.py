"""Refuses models that are spread over processes, or not complete yet, in one line that says what to do instead."""

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tightfit.errors import ModelError

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def refuse_distributed(model: nn.Module, what: str) -> None:
    """Raise `ModelError` for a model that is wrapped for several processes, holds shards of its parameters, or has
    parameters without a shape.
    """
    refuse_lazy(model, what)
    refuse_wrapped(model, what)
    refuse_sharded(model, what)


def refuse_lazy(model: nn.Module, what: str) -> None:
    """Raise `ModelError` for a model with lazy modules (`nn.LazyLinear`) that have met no batch yet."""
    lazy = next((name for name, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise ModelError(
            f"{what} needs shapes, and {lazy} of a lazy module has none yet: run model(**batch) once before, under "
            "torch.no_grad()"
        )


def refuse_wrapped(model: nn.Module, what: str) -> None:
    """Raise `ModelError` for a model in a wrapper, because its parameters have other names than the plan's."""
    for path, module in model.named_modules():
        if isinstance(module, _WRAPPERS) or _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            inner = f"{path}.module".lstrip(".")
            is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
            how = "with parallel='ddp'" if is_ddp else "for one process"
            raise ModelError(
                f"{what} does not support {type(module).__name__} yet: plan the module inside (model.{inner}) {how}, "
                "and apply the plan to it before you wrap it"
            )


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Raise `ModelError` for a model with sharded parameters, because a dry run does not know their memory."""
    sharded = next((name for name, parameter in model.named_parameters() if is_distributed(parameter)), None)
    if sharded is not None:
        raise ModelError(
            f"{what} does not support parameters that are DTensors yet ({sharded}): plan the model before it is "
            "sharded (fully_shard, parallelize_module); the plan can be applied to it before or after that"
        )


def is_distributed(tensor: Tensor) -> bool:
    """True if a tensor is a `DTensor`."""
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def _is(item: Any, module: str, name: str) -> bool:
    # Without an import: where the module was never loaded, no such object exists, and loading it takes time.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(item, kind)
