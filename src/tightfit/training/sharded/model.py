"""FSDP2 in a training: what it is refused for, the model sharded as the prediction simulates it, and whole again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tightfit.errors import ConfigError, InputError, ModelError
from tightfit.models.masks import masks_of
from tightfit.names import FEW_BITS, OPTIMIZERS, parse_optimizer
from tightfit.ranks.processes.ranks import Ranks, SeveralRanks
from tightfit.ranks.shards import whole
from tightfit.ranks.simulated import own_copy
from tightfit.ranks.world import Sharding
from tightfit.ranks.wrapping import in_fsdp2
from tightfit.step import Precision
from tightfit.training.config import Config
from tightfit.training.optimizer import optimizer_for
from tightfit.training.state import edges_digest

_STEPPING = tuple(name for name, facts in OPTIMIZERS.items() if facts.steps_shards)
_OR_DDP = "or training.parallel to ddp"
_DPO = "training.objective is dpo, whose reference needs the whole model: set training.parallel to ddp"


def demand_shardable(config: Config) -> None:
    """Raise `ConfigError` for what FSDP2 does not train yet, as far as the configuration says it."""
    training, memory = config.training, config.memory
    base = getattr(getattr(config.model, "adapter", None), "base", None)
    refused = {
        "training.precision is fp16, whose scaled gradients are not unscaled on shards: set it to bf16 or fp32": (
            training.precision == "fp16"
        ),
        _DPO: training.objective == "dpo",
        f"training.optimizer {training.optimizer} does not step shards: set it to one of {', '.join(_STEPPING)}, "
        f"{_OR_DDP}": parse_optimizer(training.optimizer).kind not in _STEPPING,
        f"model.adapter.base is {base}, and weights in few bits are not sharded: set it to bf16 or fp32, {_OR_DDP}": (
            base in FEW_BITS
        ),
        f"memory.verify compares whole models: set it to false, {_OR_DDP}": memory.verify,
        f"memory.recompute is set by hand, which no rank of FSDP2 is predicted with: set memory.budget, {_OR_DDP}": (
            memory.recompute is not None
        ),
        "memory.levers names offload, with which no training on cards was tried: leave it out": (
            memory.levers is not None and not isinstance(memory.levers, str) and "offload" in memory.levers
        ),
        f"memory.compile_blocks was compared on no rank of FSDP2: set it to false, {_OR_DDP}": memory.compile_blocks,
        f"checkpoint.in_background is of one process that writes: set it to false, {_OR_DDP}": (
            config.checkpoint.in_background
        ),
    }
    for line, is_so in refused.items():
        if is_so:
            raise ConfigError(f"training.parallel is fsdp2, and {line}")


def demand_shardable_model(model: nn.Module, config: Config, objective: str) -> None:
    """Raise `InputError` for a model, or an objective that the data has chosen, that FSDP2 does not train yet."""
    if objective == "dpo":
        raise ConfigError(f"training.parallel is fsdp2, and {_DPO}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    effective = optimizer_for(config.training.optimizer, trained)
    reason = None
    if masks_of(model):
        reason = "masks keep weights of it at zero"
    elif effective not in _STEPPING:
        reason = f"weights in bf16 are trained by {effective}, which does not step shards (model.dtype=fp32 is trained)"
    if reason is not None:
        raise ModelError(f"training.parallel is fsdp2, and {reason}: set training.parallel to ddp")


def may_be_sharded(config: Config, model: nn.Module, objective: str) -> bool:
    """True if nothing is refused."""
    try:
        demand_shardable(config)
        demand_shardable_model(model, config, objective)
    except InputError:
        return False
    return True


def shard(
    model: nn.Module,
    blocks: Sequence[str],
    ranks: Ranks,
    sharding: Sharding,
    *,
    precision: Precision,
) -> None:
    """Shard the model in place, over all ranks, as `ranks.simulated` does it for the prediction. Levers are on it
    already. Raises `ModelError` for a model that PyTorch refuses.
    """
    from torch.distributed.device_mesh import init_device_mesh

    assert isinstance(ranks, SeveralRanks), "one process has nothing to share"
    with ranks.talking():
        mesh = init_device_mesh(ranks.device_type, (ranks.size,))
        try:
            in_fsdp2(model, blocks, mesh, sharding, precision=precision)
        except (ValueError, NotImplementedError, AssertionError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ModelError(f"{type(model).__name__} does not run in fsdp2: {reason}") from error


class WholeModel:
    """The model as one process has it, to be filled with the trained weights at the end: on rank 0, without memory
    until then. Made before levers and shards are on the model. `frozen` is the digest of the weights that stay.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        self._ranks = ranks
        self.frozen = edges_digest(model)
        self._empty = own_copy(model) if ranks.is_first else None

    @property
    def unfilled(self) -> nn.Module:
        """The model on the CPU, to plan with. On rank 0, before it is filled."""
        assert self._empty is not None, "rank 0 plans for all"
        return self._empty.to("cpu")  # its buffers are the sharded model's

    def filled(self, model: nn.Module) -> nn.Module:
        """With the weights of a sharded model, on the CPU; on the other ranks the sharded model. All ranks call it."""
        targets: dict[str, Any] = {} if self._empty is None else dict(self._empty.named_parameters())
        with self._ranks.talking(), torch.no_grad():
            for name, parameter in model.named_parameters():
                content = whole(parameter)
                if targets:
                    # A gathered tensor is a view of a padded one, which safetensors would refuse.
                    targets[name].data = torch.empty(content.shape, dtype=content.dtype).copy_(content)
                del content
        if self._empty is None:
            return model
        return self._empty.to("cpu")
