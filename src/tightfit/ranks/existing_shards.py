"""A model that somebody else has sharded with FSDP2: how, the whole model, and a copy of that sharded alike."""

import copy
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import nn

from tightfit.errors import ModelError
from tightfit.ranks.shards import free_gathered, without_messages
from tightfit.ranks.world import Shards, Unit
from tightfit.runtime.internals import classes_before_fsdp2, forget_fsdp2, groups_of_state, states_of_fsdp2
from tightfit.runtime.module_paths import module_at, named_modules, tensors_of
from tightfit.tracing.shapes import TensorShape

# What FSDP2 can be told of a group, or of a module, after `fully_shard`, and PyTorch's defaults.
_OF_GROUPS = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reshard_after_backward": True,
    "unshard_async_op": False,
    "unshard_in_backward": True,
    "gradient_divide_factor": None,
    "force_sum_reduction_for_comms": False,
    "reduce_scatter_unused_params": False,
    "reduce_scatter_max_input_buffers": 1,
    "_all_reduce_hook": None,
}
_MESSAGES = {"_all_gather_comm": "DefaultAllGather", "_reduce_scatter_comm": "DefaultReduceScatter"}
_ALONE = "train without it, or without the budget"


def shards_of(model: nn.Module, ranks: int, *, no_sync: bool = False) -> Shards:
    """How a model is sharded over so many ranks. Raises `ModelError` for what no rank is simulated with."""
    modules = dict(named_modules(model))
    paths = {id(module): path for path, module in modules.items()}
    states = states_of_fsdp2(modules.values())
    units = {}
    for state in states:
        _demand_plain_state(state, paths)
        unit = _unit(state, paths, ranks)
        units.update(dict.fromkeys(unit.paths, unit))
    names = {name for unit in units.values() for name in unit.parameters}
    taken = {id(modules[name.rpartition(".")[0]].get_parameter(name.rpartition(".")[2])) for name in names}
    left = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in taken}
    for name in sorted(left, key=lambda name: not _is_distributed(left[name])):
        what = "sharded by another engine than FSDP2" if _is_distributed(left[name]) else "left out (ignored_params)"
        raise ModelError(f"{name} is {what}, and no rank is predicted with that: {_ALONE}")
    return Shards(_inner_first(units), no_sync)


def _inner_first(units: dict[str, Unit]) -> tuple[Unit, ...]:
    """Each unit behind those that have a module inside of it. `units` are by the paths of their modules."""
    order: TopologicalSorter[Unit] = TopologicalSorter()
    for path, unit in units.items():
        order.add(unit)
        outer = path
        while outer:
            outer = outer.rpartition(".")[0]
            if outer in units and units[outer] is not unit:
                order.add(units[outer], unit)
    return tuple(order.static_order())


def _unit(state: Any, paths: dict[int, str], ranks: int) -> Unit:
    names: list[str] = []
    copies = 1
    reshard = None if state._auto_reshard_after_forward else False
    for group in groups_of_state(state):
        where = _where(state, paths)
        for sharded in group.fsdp_params:
            _demand_plain_parameter(sharded, where)
        copies = _copies(group.mesh_info, where, ranks)
        _demand_plain_group(group, where)
        if reshard is False and group.post_forward_mesh_info is not None:
            if group.post_forward_mesh_info is not group.mesh_info:
                raise ModelError(
                    f"{where} frees its gathered weights in part (reshard_after_forward is a number), and no rank is "
                    "predicted with that: set it to True or False"
                )
            reshard = True
        for sharded in group.fsdp_params:
            held = sharded._module_info
            names.append(f"{paths[id(held.module)]}.{held.param_name}".lstrip("."))
    modules = tuple(paths[id(module)] for module in state._modules)
    return Unit(modules, state._mp_policy, reshard, tuple(names), copies)


def _where(state: Any, paths: dict[int, str]) -> str:
    return " and ".join(paths[id(module)] or "the model" for module in state._modules)


def _copies(mesh_info: Any, where: str, ranks: int) -> int:
    """How many copies of all weights a mesh has. Raises `ModelError` for a mesh that no rank is simulated with."""
    kind, mesh = type(mesh_info).__name__, mesh_info.mesh
    is_copied = kind == "HSDPMeshInfo" and mesh.ndim == 2
    if not is_copied and (kind != "FSDPMeshInfo" or mesh.ndim != 1):
        raise ModelError(
            f"{where} is spread over {mesh.ndim} dimensions of ranks ({kind}), and ranks are predicted with a mesh of "
            "one dimension, or of HSDP's two: shard over all ranks"
        )
    if mesh.size() != ranks:
        raise ModelError(
            f"{where} is sharded over {mesh.size()} of {ranks} ranks, and ranks are predicted with one mesh of all of "
            "them: shard over all ranks"
        )
    if is_copied and mesh.size(1) == 1:
        raise ModelError(
            f"{where} is copied on every rank and sharded over none of them: use DistributedDataParallel, or a mesh of "
            "two ranks or more along its second dimension"
        )
    if mesh.mesh.flatten().tolist() != list(range(ranks)):
        raise ModelError(
            f"{where} has its ranks in another order than their numbers', and ranks are predicted in that order: "
            "let init_device_mesh make the mesh"
        )
    return mesh.size(0) if is_copied else 1


def _demand_plain_group(group: Any, where: str) -> None:
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        raise ModelError(
            f"{where} has its shards on the host (CPUOffloadPolicy), where their copies are not predicted: leave "
            "offload_policy out, or train without the budget"
        )
    changed = [name.lstrip("_") for name, default in _OF_GROUPS.items() if getattr(group, name, default) != default]
    changed += [name for name, kind in _MESSAGES.items() if type(getattr(group, name, None)).__name__ != kind]
    if changed:
        raise ModelError(f"FSDP2's {changed[0]} was set for {where}, and no rank is predicted with that: {_ALONE}")


def _demand_plain_state(state: Any, paths: dict[int, str]) -> None:
    if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
        raise ModelError(
            f"{_where(state, paths)} gathers the weights of others ahead (set_modules_to_forward_prefetch), and no "
            f"rank is predicted with that: {_ALONE}"
        )


def _demand_plain_parameter(sharded: Any, where: str) -> None:
    if sharded.is_dtensor:
        raise ModelError(
            f"{where} holds parameters that are sharded twice (tensor parallel inside of FSDP2), and ranks are "
            "predicted with FSDP2 alone: leave tensor parallel out, or train without the budget"
        )
    if sharded.fsdp_placement.dim:
        raise ModelError(
            f"{where} is sharded along dimension {sharded.fsdp_placement.dim} (shard_placement_fn), and no rank is "
            f"predicted with that: {_ALONE}"
        )
    kind = type(sharded._sharded_param_data)
    if kind is not torch.Tensor:
        raise ModelError(
            f"{where} holds a {kind.__name__}: a prediction for several ranks takes plain weights only: load the model "
            "without quantisation"
        )


def sharded_alike(model: nn.Module, shards: Shards, mesh: Any) -> nn.Module:
    """The model itself, sharded in place as another one was found. Raises `ModelError` where that comes out otherwise.

    With `no_sync`, its method of that name is a context in which gradients are not exchanged.
    """
    from torch.distributed.fsdp import fully_shard

    for unit in shards.units:
        modules = [module_at(model, path) for path in unit.paths]
        held: Any = modules[0] if len(modules) == 1 else modules
        fully_shard(held, mesh=mesh, mp_policy=unit.policy, reshard_after_forward=unit.reshard_after_forward)
    made = shards_of(model, mesh.size(), no_sync=shards.no_sync)
    if set(made.units) != set(shards.units):
        raise ModelError(
            "the model was sharded in a way that `fully_shard` does not repeat on a copy of it: call fully_shard for "
            "inner modules first, on the model as it is trained"
        )
    if shards.no_sync:
        model.__dict__["no_sync"] = partial(without_messages, model)
    return model


def as_before_sharding(model: nn.Module) -> nn.Module:
    """A copy of a model that FSDP2 has sharded, as it was before: whole parameters, which have no memory.

    Its other tensors are the model's own. Levers that are on the model are on the copy too. Raises `ModelError` where
    Python cannot copy the modules.
    """
    free_gathered(model)
    modules = [module for _, module in named_modules(model)]
    memo = kept_as_they_are(model)
    for module in modules:
        for parameter in module.parameters(recurse=False):
            whole = TensorShape.of(parameter).unbacked()  # of a distributed tensor: the shape of the whole
            memo[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    memo.update((id(state), object()) for state in states_of_fsdp2(modules))
    try:
        with classes_before_fsdp2(modules):
            made = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{type(model).__name__} cannot be copied for a rank: {reason}") from error
    for _, module in named_modules(made):
        forget_fsdp2(module)
    return made


def kept_as_they_are(model: nn.Module) -> dict[int, Any]:
    """The objects that a copy of a model for one rank shares with it, as `copy.deepcopy` takes it: tensors, and meshes
    of ranks.
    """
    memo: dict[int, Any] = {}
    for _, module in named_modules(model):
        memo.update((id(tensor), tensor) for tensor in tensors_of(module))
        memo.update((id(value), value) for value in vars(module).values() if type(value).__name__ == "DeviceMesh")
    return memo


def _is_distributed(parameter: Any) -> bool:
    return hasattr(parameter, "device_mesh")
