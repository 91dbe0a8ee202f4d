"""One rank of DDP, FSDP2, tensor or context parallel for a dry run: a real one's code, whose group sends nothing."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tightfit.errors import InputError, ModelError
from tightfit.ranks.context_parallel import in_context_parallel
from tightfit.ranks.existing_shards import kept_as_they_are, sharded_alike
from tightfit.ranks.tensor_parallel import in_tensor_parallel
from tightfit.ranks.world import World
from tightfit.ranks.wrapping import in_ddp, in_fsdp2, mesh_of
from tightfit.runtime.internals import around_messages_of_fsdp2, fake_process_group
from tightfit.runtime.module_paths import named_modules
from tightfit.runtime.simulation import host_memory, simulation
from tightfit.step import Precision
from tightfit.tracing.shapes import TensorShape


@dataclass
class SimulatedRank:
    """A rank of a world, as `tracing.surroundings` simulates it. `blocks` are the paths that FSDP2 wraps one by one."""

    world: World
    number: int
    blocks: Sequence[str]
    precision: Precision = "fp32"

    @property
    def steps(self) -> int:
        # DDP makes its buckets anew when the second step begins, in the order in which gradients were ready.
        return 3 if self.world.parallel == "ddp" else 2

    @property
    def reduces_once(self) -> bool:
        """True if gradients are added up in the last micro-batch only."""
        if self.world.parallel == "ddp":
            return self.world.ddp.no_sync
        if self.world.parallel == "tp":
            return False  # gradients are of parts, and complete
        return self.world.sharding.reduces_once if self.world.shards is None else self.world.shards.no_sync

    @property
    def is_on_host(self) -> bool:
        """True if shards are in host memory, where they are updated."""
        return self.world.is_sharded and self.world.sharding.on_host

    @contextmanager
    def simulated(self) -> Iterator[None]:
        with fake_process_group(self.number, self.world.size), self._copying():
            yield

    def _copying(self) -> AbstractContextManager[Any]:
        # CPU tensors stand for those of the card, so FSDP2's copies between both would not be made.
        if not self.is_on_host or simulation.link is None:
            return nullcontext()
        return around_messages_of_fsdp2(MovesOfShards(to_host=False), MovesOfShards(to_host=True))

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Raises `ModelError` for a model that PyTorch's engine refuses."""
        try:
            return in_ddp(model, self.world.ddp) if self.world.parallel == "ddp" else self._in_parts(model)
        except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ModelError(f"{type(model).__name__} does not run in {self.world.parallel}: {reason}") from error

    def _in_parts(self, model: nn.Module) -> nn.Module:
        # What PyTorch keeps by mesh names groups: of a mesh of copies, those that a rank is in.
        own = f"{self.number} " if self.world.copies > 1 else ""
        # A mesh has the numbers of its ranks in the host's memory, whatever its device.
        with host_memory() if simulation.of_cuda else nullcontext():
            mesh = mesh_of(self.world, "cpu", prefix=f"simulated {own}")
        if self.world.parallel == "tp":
            return in_tensor_parallel(model, mesh)
        if self.world.shards is not None:
            return sharded_alike(model, self.world.shards, mesh)
        engine = in_context_parallel if self.world.parallel == "cp" else in_fsdp2
        return engine(model, self.blocks, mesh, self.world.sharding, precision=self.precision)


@contextmanager
def refusals_of_shards(optimizer: str) -> Iterator[None]:
    """A context in which an operator that PyTorch does not have for shards raises `InputError`."""
    try:
        yield
    except RuntimeError as error:
        if "Sharding propagation failed" not in str(error):
            raise
        raise InputError(
            f"optimizer {optimizer} does not run on these shards: {str(error).splitlines()[0]}: take adamw, or ddp"
        ) from error


def own_copy(model: nn.Module) -> nn.Module:
    """A copy of a model for one rank. Its parameters have no memory, and its other tensors are the model's own.

    Raises `ModelError` where Python cannot copy the modules, and for parameters of classes that cannot be sharded.
    """
    memo = kept_as_they_are(model)
    for path, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            if type(parameter) is not nn.Parameter:
                raise ModelError(
                    f"{f'{path}.{name}'.lstrip('.')} is a {type(parameter).__name__}: an estimate for several ranks "
                    "takes plain weights only: load the model without quantisation"
                )
            memo[id(parameter)] = _without_memory(parameter)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{type(model).__name__} cannot be copied for a rank: {reason}") from error


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    shape = TensorShape.of(parameter)
    return nn.Parameter(shape.unbacked(), requires_grad=parameter.requires_grad)


class MovesOfShards(TorchFunctionMode):
    """A mode in which moves of plain tensors to a device are copies to the host, or to the card.

    CPU tensors stand for those of the card, so a move of a tensor to the device that it is on already would do nothing.
    Under `CPUOffloadPolicy` FSDP2 moves shards: while it prepares a gather, a move to a device makes a copy in the
    card's memory. While it takes what was reduced, a move makes one in the host's, and sums of gradients run there.
    """

    def __init__(self, *, to_host: bool):
        super().__init__()
        self.to_host = to_host

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            return simulation.link.moved(args[0], to_host=self.to_host)
        if func is torch.Tensor.__iadd__ and self.to_host:
            with host_memory():
                return func(*args, **kwargs)
        return func(*args, **kwargs)
