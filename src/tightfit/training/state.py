"""The state of a training: tensors by name, and a record in JSON. A checkpoint holds both and nothing else.

Tensors: trained weights, buffers, optimizer states, random states. Weights that are not trained (the base
under adapters) are read from where they came from, and only compared. The record says how the optimizer's states lie
in the tensors; a state that is no plain tensor (codes with their scales) is stored by its parts, and made by the
optimizer's own code before they are read. So nothing in a checkpoint names code.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.errors import CheckpointError
from tightfit.memory.allocator import memory_of
from tightfit.names import MODEL
from tightfit.optim.strict_state import StrictStateOptimizer
from tightfit.planner.wrapped import is_distributed
from tightfit.ranks.processes.ranks import ALONE, Ranks
from tightfit.ranks.shards import rows_of_shard
from tightfit.training.random_states import RANDOM, random_states_of_all, set_random_states

OPTIMIZER = "optimizer"
_EDGE = 1 << 16  # bytes at either end of a frozen weight that are compared


class Spec(Protocol):
    """A stored tensor: its dtype, by torch's name without `torch.`, and shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Stored(Protocol):
    """A checkpoint, as far as a state is read from one."""

    @property
    def record(self) -> Mapping[str, Any]: ...

    @property
    def specs(self) -> Mapping[str, Spec]: ...

    def read_into(self, tensors: Mapping[str, Tensor]) -> None: ...

    def read_rows(self, wanted: Mapping[str, tuple[int, Tensor]]) -> None: ...

    def read(self, name: str) -> Tensor: ...


class State(NamedTuple):
    """Tensors by name, those of the training itself and no copies, and what is no tensor, as JSON.

    Those that FSDP2 has sharded are whole by their shapes, and each rank holds its rows of them.
    """

    tensors: dict[str, Tensor]
    record: dict[str, Any]


@dataclass(frozen=True)
class TrainingState:
    """The state of a model, its optimizer and its gradient scaler, and of all random generators."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    ranks: Ranks = ALONE
    frozen: str | None = None  # the digest of weights that are not trained; None: the model has all of them whole

    def capture(self) -> State:
        """Everything as it is now. Nothing is copied but the random states, of 5 kB.

        Several ranks call it together. Each returns the random states of all.
        """
        states = optimizer_states(self.model, self.optimizer)
        chance = random_states_of_all(self.ranks)
        return State(
            {**weights(self.model), **states.tensors, **chance.tensors},
            {
                OPTIMIZER: states.record,
                "kind": type(self.optimizer).__name__,
                RANDOM: chance.record,
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "frozen": self._frozen(),
            },
        )

    def restore(self, stored: Stored) -> None:
        """Read a captured state straight into the weights and into states that are made here, once.

        At no time is there more than the weights and the states: a restored training needs no more memory than one that
        goes on. Raises `CheckpointError` where a name, a dtype or a shape is not this training's; nothing has moved
        then but empty optimizer states.
        """
        if stored.record["frozen"] != self._frozen():
            raise CheckpointError("the weights under the adapters are not those that the checkpoint was trained on")
        kind = type(self.optimizer).__name__
        if stored.record["kind"] != kind:
            raise CheckpointError(f"the checkpoint has states of {stored.record['kind']}, and this training has {kind}")
        make_states(self.model, self.optimizer, stored)
        targets = {**weights(self.model), **optimizer_states(self.model, self.optimizer).tensors}
        _demand_same(stored.specs, targets)
        stored.read_into({name: tensor for name, tensor in targets.items() if not is_distributed(tensor)})
        stored.read_rows({name: rows_of_shard(tensor) for name, tensor in targets.items() if is_distributed(tensor)})
        _set_numbers(self.model, self.optimizer, stored.record[OPTIMIZER])
        if isinstance(self.optimizer, StrictStateOptimizer):
            self.optimizer.states_were_read()
        if self.scaler is not None:
            self.scaler.load_state_dict(stored.record["scaler"])
        set_random_states(stored, self.ranks)

    def _frozen(self) -> str:
        return edges_digest(self.model) if self.frozen is None else self.frozen


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters, those under several names once, and buffers."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {f"{MODEL}.{name}": t.detach() for name, t in {**trained, **dict(model.named_buffers())}.items()}


def optimizer_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The optimizer's states by the parameters' names; a tensor that several share (a table of values) once.

    The record has for each parameter and key one of `{"tensor": name}`, `{"parts": [names]}` and `{"value": number}`.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def kept(name: str, tensor: Tensor) -> str:
        known = names.setdefault(id(tensor), name)
        tensors[known] = tensor.detach()
        return known

    record: dict[str, Any] = {}
    for parameter_name, parameter in _trained(model):
        entry = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"{OPTIMIZER}.{parameter_name}.{key}"
            if not isinstance(value, Tensor):
                entry[key] = {"value": _number(value, name)}
            elif is_traceable_wrapper_subclass(value) and not is_distributed(value):
                entry[key] = {"parts": [kept(f"{name}.{i}", part) for i, part in enumerate(memory_of(value))]}
            else:
                entry[key] = {"tensor": kept(name, value)}
        if entry:
            record[parameter_name] = entry
    return State(tensors, record)


def make_states(model: nn.Module, optimizer: torch.optim.Optimizer, stored: Stored) -> None:
    """Memory for the states that a checkpoint has, which an optimizer makes in its first step."""
    groups = {id(p): (i, j, group) for i, group in enumerate(optimizer.param_groups)
              for j, p in enumerate(group["params"])}  # fmt: skip
    record = stored.record[OPTIMIZER]
    parameters = dict(_trained(model))
    _demand_known(record, parameters)
    for name, entry in record.items():
        parameter = parameters[name]
        first, second, group = groups[id(parameter)]
        of_bitsandbytes: Any = getattr(optimizer, "init_state", None)
        if of_bitsandbytes is not None:  # it has tables of values that all parameters share
            of_bitsandbytes(group, parameter, first, second)
            continue
        state = optimizer.state[parameter]
        for key, what in entry.items():
            if "parts" in what:  # torchao: zeros of its own kind; the first moment has a sign
                buffer: Any = optimizer._new_buffer(parameter, key == "exp_avg")  # pyright: ignore
                state[key] = buffer
            elif "tensor" in what:
                state[key] = _empty(optimizer, group, parameter, key, _spec(stored, what["tensor"]))
            else:
                state[key] = what["value"]


def _empty(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, key: str, spec: Spec
) -> Tensor:
    """Memory for one state, where the optimizer would have made it."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if key == "step" and not group.get("fused") and not group.get("capturable"):
        return torch.empty(spec.shape, dtype=dtype)  # PyTorch's optimizers read it on the host
    if isinstance(optimizer, StrictStateOptimizer):
        return optimizer.empty_state(parameter, key, spec.shape, dtype)
    if spec.shape == tuple(parameter.shape):  # with the strides that it has when the optimizer makes it
        return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    return torch.empty(spec.shape, dtype=dtype, device=parameter.device)


def _set_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> None:
    parameters = dict(_trained(model))
    for name, entry in record.items():
        for key, what in entry.items():
            if "value" in what:
                optimizer.state[parameters[name]][key] = what["value"]


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _number(value: Any, name: str) -> Any:
    assert value is None or isinstance(value, bool | int | float), f"{name} is a {type(value).__name__}: save it too"
    return value


def _spec(stored: Stored, name: str) -> Spec:
    if name not in stored.specs:
        raise CheckpointError(f"the checkpoint has no {name}")
    return stored.specs[name]


def _demand_known(record: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    for name in record:
        if name not in parameters:
            raise CheckpointError(f"the checkpoint has optimizer states of {name}, which is not trained here")


def _demand_same(specs: Mapping[str, Spec], targets: Mapping[str, Tensor]) -> None:
    """Every tensor of the checkpoint has its place here and the other way round, of one dtype and shape."""
    stored = {name for name in specs if not name.startswith(f"{RANDOM}.")}
    for name in sorted(stored ^ targets.keys()):
        holder, other = ("the checkpoint", "this training") if name in stored else ("this training", "the checkpoint")
        raise CheckpointError(f"{holder} has a tensor {name}, and {other} has not")
    for name, tensor in targets.items():
        spec = specs[name]
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if (spec.dtype, tuple(spec.shape)) != found:
            raise CheckpointError(
                f"{name} is {spec.dtype} {list(spec.shape)} in the checkpoint and {found[0]} {list(found[1])} here"
            )


def edges_digest(model: nn.Module, *, trained: bool = False) -> str:
    """Of the weights that are not trained, or of those that are: names, shapes, and the bytes at the edges of each;
    empty without any.

    Enough to tell another base from this one, and quick for 100 GB.
    """
    digest, count = 0, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad == trained:
            for part in memory_of(parameter.data):
                flat = part.detach().reshape(-1)
                edge = max(1, _EDGE // flat.element_size())
                digest = zlib.crc32(f"{name} {part.dtype} {tuple(part.shape)}".encode(), digest)
                for piece in (flat[:edge], flat[-edge:]):
                    content = piece.cpu().contiguous().view(torch.uint8)
                    digest = zlib.crc32(content.numpy().tobytes(), digest)
            count += 1
    return f"{digest:08x}" if count else ""
