"""The arguments of `tightfit.plan` as one record, and the planner's request that they lead to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn

from tightfit.devices.present import lookup
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import InputError
from tightfit.levers.offload import OffloadSettings, positive_bytes
from tightfit.planner.arguments import (
    check_levers,
    check_settings,
    check_step,
    check_step_in_backward,
    check_steps,
    check_world,
    levers_of_ranks,
)
from tightfit.planner.levers import MicroBatches, Offload, allowed_levers
from tightfit.planner.request import Optimizer, Request
from tightfit.planner.wrapped import refuse_distributed
from tightfit.ranks.processes.launch import launched
from tightfit.ranks.world import Sharding, Shards, world_of
from tightfit.runtime.internals import default_group, process_group_exists
from tightfit.step import Batch, Loss, Precision, StepSettings, model_loss
from tightfit.tracing.twin import has_no_memory, twin_of, with_memory


@dataclass(frozen=True)
class Asked:
    """The arguments of `tightfit.plan` as the user gave them, except the budget. Those of `estimate` are a subset."""

    model: nn.Module
    batch: Batch
    loss: Loss | None = None
    optimizer: Optimizer = "adamw"
    precision: Precision = "fp32"
    device: Any = None
    micro_batches: int | Literal["auto"] = 1
    grad_clip: float | None = None
    keep_gradients: bool | None = None
    step_in_backward: bool = False
    levers: str | Sequence[str] | None = None
    blocks: str | None = None
    offload_folder: str | None = None
    offload_budget: int | str | None = None
    world_size: int | None = None
    nodes: int | None = None
    parallel: str | None = None
    steps: int | None = None
    ddp: Mapping[str, Any] | None = None
    apart: tuple[str, ...] | None = None  # of FSDP2, in a training that runs: what is sharded beside the blocks
    shards: Shards | None = None  # of FSDP2, as it was found around a running model, whose whole twin is `model`

    @property
    def how(self) -> dict[str, Any]:
        """All arguments except model and batch, by name."""
        names = [field.name for field in fields(self)]
        return {name: getattr(self, name) for name in names if name not in ("model", "batch")}

    @property
    def count(self) -> int:
        """The micro-batches of the plain step: one if the plan chooses their number."""
        return 1 if self.micro_batches == "auto" else self.micro_batches

    @property
    def ranks(self) -> int | None:
        """The number of ranks: that of the run that this process is part of, for DDP without a number."""
        group = default_group() if self.parallel == "ddp" and self.world_size is None else None
        return self.world_size if group is None else group.size()

    def without_levers(self) -> "Asked":
        """The step without arguments of levers. An estimate must not fail for a lever that the device refuses."""
        return replace(self, levers=None, blocks=None, offload_folder=None, offload_budget=None)

    def request(self, *, may_choose: bool = False) -> Request:
        """Check the arguments and make the request. With `may_choose`, `micro_batches="auto"` is allowed.

        Raises `InputError`, `ModelError`, `LeverError` and `DeviceError`.
        """
        chooses = may_choose and self.micro_batches == "auto"
        count: Any = 1 if chooses else self.micro_batches
        check_step(self.model, self.batch, self.loss, self.optimizer, self.precision)
        check_settings(count, self.grad_clip, self.blocks)
        check_step_in_backward(self.step_in_backward, self.grad_clip, self.precision)
        check_levers(self.levers)
        refuse_distributed(self.model, "a plan or an estimate")
        world = world_of(self.ranks, self.nodes, self.parallel, self.ddp, self.shards)
        if world is not None and self.apart is not None:
            world = replace(world, sharding=Sharding(apart=self.apart), keeps_units=True)
        check_world(world, self.optimizer, self.step_in_backward, 2 if chooses else count)
        keeps = gradients_are_zero(self.model) if self.keep_gradients is None else self.keep_gradients
        model, batch = as_twins(self.model, self.batch, self.optimizer)
        device = device_of_a_rank(self.device, in_ranks=world is not None)
        levers = levers_of_ranks(world, self.levers, device)
        check_steps(self.steps)
        return Request(
            model=model,
            batch=batch,
            loss=self.loss or model_loss,
            optimizer=self.optimizer,
            settings=StepSettings(self.precision, self.grad_clip, keeps, self.step_in_backward),
            device=device,
            levers=levers | {MicroBatches.name} if chooses else levers,
            blocks=self.blocks,
            micro_batches=count,
            fewest_micro_batches=chooses,
            offload=OffloadSettings(self.offload_folder, positive_bytes(self.offload_budget)),
            world=world,
            shards_leave=world is not None and Offload.name in allowed_levers(self.levers),
            steps=self.steps,
        )


def device_of_a_rank(named: Any, *, in_ranks: bool) -> DeviceSpec:
    """The device as one rank has it: the ranks that torchrun started on a machine share its memory."""
    device, launch = lookup(named), launched() if in_ranks and process_group_exists() else None
    if launch is None or device.kind != "cpu":
        return device
    return replace(device, memory_bytes=device.memory_bytes // launch.local_size)


def gradients_are_zero(model: nn.Module) -> bool:
    """Whether the model has gradients and all of them are zero."""
    # Only `zero_grad(set_to_none=False)` leaves such gradients: a backward leaves others (docs/lab-notes.md, "Gradients
    # that stay"). Sparse gradients and those without memory cannot be read here.
    held = [p.grad for p in model.parameters() if p.grad is not None]
    known = all(g.layout is torch.strided and not has_no_memory(g) for g in held)
    return bool(held) and known and not any(bool(g.detach().any()) for g in held)


def as_twins(model: nn.Module, batch: Batch, optimizer: Optimizer) -> tuple[nn.Module, Batch]:
    """Model and batch, replaced by twins that can run dry if they are on meta or fake.

    Raises `InputError` and `ModelError`.
    """
    twin = twin_of(model)
    if twin is not model and isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer: this {type(optimizer).__name__} holds parameters without memory (meta, or fake): give its "
            "name, or a callable that takes parameters"
        )
    return twin, with_memory(batch, model)
