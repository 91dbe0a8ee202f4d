"""FSDP2's records of what it has sharded, and modules as they were before.

The private names are those of `torch.distributed.fsdp._fully_shard`, alike in torch 2.11 to 2.13, with one exception
that says so here.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

_PACKAGE = "torch.distributed.fsdp"
_KINDS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")  # for the compiler, on modules with managed parameters


def states_of_fsdp2(modules: Iterable[nn.Module]) -> list[Any]:
    """FSDP2's states of these modules, one record for each call of `fully_shard`, in the order of the modules."""
    from torch.distributed.fsdp import FSDPModule

    found = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]  # pyright: ignore
    return list({id(state): state for state in found}.values())


def groups_of_state(state: Any) -> list[Any]:
    """The groups of parameters that are gathered together: one for each mesh."""
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13; one group before
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def send_messages_by(group: Any, send: Callable[[str, Callable[..., Any], dict[str, Any]], Any]) -> None:
    """Have a group of parameters send its messages through `send(kind, own, arguments)`, which sends one by
    `own(**arguments)`, or does not. The arguments hold the tensors `output_tensor` and `input_tensor`.
    """
    group._all_gather_comm = _Sender("all_gather", group._all_gather_comm, send)
    group._reduce_scatter_comm = _Sender("reduce_scatter", group._reduce_scatter_comm, send)


class _Sender:
    """The argument of `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter`, around the earlier one."""

    def __init__(self, kind: str, own: Any, send: Callable[[str, Callable[..., Any], dict[str, Any]], Any]):
        self.allocate = own.allocate
        self._kind, self._own, self._send = kind, own, send

    def __call__(self, **arguments: Any) -> Any:
        return self._send(self._kind, self._own, arguments)


def reset_fsdp2(states: Iterable[Any]) -> None:
    """Bring FSDP2's records to where they are between two steps, after an error in the middle of one. Gathered weights
    and gradients that are not reduced are let go.

    `FSDPModule.reset_iter_state` does most of this since torch 2.13. It keeps gradients of gathered weights, and the
    memory of weights that were being gathered.
    """
    states = list(states)
    for state in states:
        # What was sent before the error ends, since all have sent it or will: it writes into memory that is freed here.
        state._device_handle.synchronize()
        for group in groups_of_state(state):
            _reset_group(group)
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
    for shared in {id(state._state_ctx): state._state_ctx for state in states}.values():
        shared.iter_forward_root = None
        shared.post_backward_final_callback_queued = False
    for messages in {id(state._comm_ctx): state._comm_ctx for state in states}.values():
        _reset_messages(messages)


def _reset_group(group: Any) -> None:
    for name in ("_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event", "_all_reduce_state"):
        setattr(group, name, None)
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    for parameter in group.fsdp_params:
        parameter.to_sharded()
        if "unsharded_accumulated_grad" in vars(parameter):  # since torch 2.15 the gradient of the whole, below
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    group._sharded_state = type(group._sharded_state).SHARDED


def _reset_messages(messages: Any) -> None:
    messages.all_gather_state = None
    messages.post_forward_order.clear()
    getattr(messages, "_last_post_reduce_events", {}).clear()  # since torch 2.13
    if hasattr(messages, "reduce_scatter_states"):  # since torch 2.12; one before
        messages.reduce_scatter_states.clear()
    else:
        messages.reduce_scatter_state = None


@contextmanager
def around_messages_of_fsdp2(
    gathering: AbstractContextManager[Any], reducing: AbstractContextManager[Any]
) -> Iterator[None]:
    """A context in which FSDP2 prepares its gathers in one context, and its reductions in another."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as module

    groups: Any = module

    def within(context: AbstractContextManager[Any], function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context:
                return function(*args, **kwargs)

        return wrapped

    gather, reduce = groups.foreach_all_gather, groups.foreach_reduce
    groups.foreach_all_gather, groups.foreach_reduce = within(gathering, gather), within(reducing, reduce)
    try:
        yield
    finally:
        groups.foreach_all_gather, groups.foreach_reduce = gather, reduce


@contextmanager
def classes_before_fsdp2(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which modules have the classes that they had before `fully_shard`: those can be copied."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [(module, type(module)) for module in modules if isinstance(module, FSDPModule)]
    try:
        for module, kind in sharded:
            module.__class__ = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


def forget_fsdp2(module: nn.Module) -> None:
    """Remove from a module, a copy with its class of before, FSDP2's hooks and marks: it can be sharded anew."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for name in (REGISTRY_KEY, STATE_KEY, *_MARKS):
        module.__dict__.pop(name, None)
    tables = [value for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict)]
    for hooks in tables:
        for number in [number for number, hook in hooks.items() if _is_of_fsdp2(hook)]:
            del hooks[number]
            for beside in _KINDS_OF_HOOKS:
                getattr(module, beside, {}).pop(number, None)


def _is_of_fsdp2(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # hooks of state dicts are wrapped
    return str(getattr(hook, "__module__", "")).startswith(_PACKAGE)


def forget_placements() -> None:
    """Have PyTorch plan anew where results of operators on distributed tensors lie.

    It keeps the plans by mesh, and the mesh of a simulated group equals that of a real one.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
