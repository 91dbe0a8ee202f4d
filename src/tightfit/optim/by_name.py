"""Builds optimizers by name, with PyTorch's defaults."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from tightfit.errors import InputError, said_by
from tightfit.memory.allocator import memory_of
from tightfit.names import OPTIMIZERS, OptimizerName, parse_optimizer
from tightfit.optim import BF16AdamW, FlashAdamW, Muon8bit, MuonWithAdamW, OffloadedAdamW, step_in_backward
from tightfit.optim.base import FrugalOptimizer
from tightfit.optim.in_backward import steps_in_backward
from tightfit.optim.low_bit import adamw4bit, adamw8bit, check_device, without_its_step
from tightfit.runtime.internals import fused_kernel_devices
from tightfit.runtime.nested import tensors_in
from tightfit.runtime.users_code import object_named

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def _fused(groups: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    groups = list(groups)
    check_device("adamw_fused", groups, fused_kernel_devices())
    return torch.optim.AdamW(groups, fused=True, **options)


_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_fused": _fused,
    "adamw8bit": adamw8bit,
    "adamw4bit": adamw4bit,
    "adamw_bf16": BF16AdamW,
    "adamw_bf16_stochastic": partial(BF16AdamW, keeping="stochastic"),
    "flash_adamw": FlashAdamW,
    "offloaded_adamw": OffloadedAdamW,
    "offloaded_adamw_fused": partial(OffloadedAdamW, fused=True),
    "adam": torch.optim.Adam,
    "muon": MuonWithAdamW,
    "muon8bit": Muon8bit,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
}


def build_optimizer(
    kind: str | OptimizerFactory | torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer over the trained parameters.

    `kind` is a name (`adamw`, `muon`, `offloaded_adamw:0.5`, `torch.optim:RAdam(lr=0.001)`, ...), a callable that takes
    parameters, or an optimizer. Of an optimizer, the class and the settings of each group are copied, but not the
    state. Raises `InputError` for an unknown name, a missing package or unsuitable weights, and `DeviceError` if the
    optimizer cannot run on the parameters' device.
    """
    trained = [p for p in parameters if p.requires_grad]
    if isinstance(kind, torch.optim.Optimizer):
        # The user's own optimizer must not be stepped: its states are part of the training.
        return optimizer_over(kind)
    if callable(kind):
        return kind(trained)
    return optimizer_by_name(kind, trained, options)


def optimizer_by_name(name: str, groups: Iterable[Any], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer over parameters or groups. Of `settings`, it uses those that it shares with AdamW.

    Raises the same errors as `build_optimizer`.
    """
    parsed = parsed_name(name)
    kind, facts = parsed.kind, parsed.facts
    options = {key: value for key, value in settings.items() if key in facts.takes}
    groups = list(groups)
    if kind not in OPTIMIZERS:
        return optimizer_of_class(kind, groups, {**options, **parsed.arguments})
    if parsed.fraction is not None:
        options["fraction"] = parsed.fraction
    if facts.needs_bf16:
        _demand_bf16(kind, groups)
    return _KINDS[kind](groups, **options)


def _demand_bf16(kind: str, groups: list[Any]) -> None:
    """Raise `InputError` without bf16 weights: on fp32 weights these optimizers equal AdamW and save nothing."""
    given = [group["params"] if isinstance(group, dict) else [group] for group in groups]
    members = [parameter for group in given for parameter in group]
    if members and not any(p.dtype == torch.bfloat16 for p in members):
        raise InputError(
            f"optimizer {kind} is for bf16 weights, and none that is trained here is bf16: convert the model with "
            "model.to(torch.bfloat16), or take adamw"
        )


def parsed_name(name: str) -> OptimizerName:
    """An optimizer's name in its parts. Raises `InputError`."""
    try:
        return parse_optimizer(name)
    except ValueError as error:
        raise InputError(str(error)) from None


def optimizer_over(
    optimizer: torch.optim.Optimizer, copies: Mapping[torch.Tensor, torch.Tensor] | None = None
) -> torch.optim.Optimizer:
    """A new optimizer of the same class and settings, without states, over the same parameters or their `copies`."""
    copies = copies or {}
    groups = [{**group, "params": [copies.get(p, p) for p in group["params"]]} for group in optimizer.param_groups]
    if isinstance(optimizer, FrugalOptimizer):
        twin: torch.optim.Optimizer = optimizer.twin(groups)
    else:
        accepted = inspect.signature(type(optimizer)).parameters  # `defaults` holds more than the constructor takes
        settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        twin = without_its_step(type(optimizer))(groups, **settings)
    if steps_in_backward(optimizer):
        step_in_backward(twin, [p for group in twin.param_groups for p in group["params"]])
    return twin


def moves_gradients(optimizer: Any) -> bool:
    """True if an optimizer, or the one of a name, moves gradients to the host as backward makes them."""
    name = _name_of(optimizer)
    if name is not None:
        return parsed_name(name).facts.on_host
    return isinstance(optimizer, OffloadedAdamW)


def updates_on_host(optimizer: Any, *, on_card: bool) -> bool:
    """True if an optimizer, or the one of a name, updates all weights in the host's memory. On a CPU each does."""
    if not on_card:
        return True
    name = _name_of(optimizer)
    if name is not None:
        parsed = parsed_name(name)
        return parsed.facts.on_host and parsed.fraction in (None, 1)
    return isinstance(optimizer, OffloadedAdamW) and optimizer.fraction == 1


def _name_of(optimizer: Any) -> str | None:
    """The name by which an optimizer is made: itself, or the `kind` of a factory that has one (a training's)."""
    name = getattr(optimizer, "kind", optimizer)
    return name if isinstance(name, str) else None


def host_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """States in host memory while the parameters are on CUDA: the counts of steps, if the optimizer is neither fused
    nor capturable (`_init_group` in torch/optim/adam.py and its neighbours).
    """
    return [
        state["step"]
        for group in optimizer.param_groups
        if not group.get("fused") and not group.get("capturable")
        for parameter in group["params"]
        if isinstance((state := optimizer.state.get(parameter, {})).get("step"), torch.Tensor)
    ]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor of the optimizer's state."""
    return [tensor for _, _, tensor in named_states(optimizer)]


def named_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Each tensor of the optimizer's state as (parameter, name of the state, tensor)."""
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            for leaf in tensors_in(value):
                yield from ((parameter, key, tensor) for tensor in memory_of(leaf))
    if isinstance(optimizer, OffloadedAdamW):
        yield from ((parameter, "weight on the host", copy) for parameter, copy in optimizer.host_weights.items())


def optimizer_of_class(name: str, groups: Iterable[Any], arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that `module:Class` names, over parameters or groups.

    Args:
        name: `module:Class`. The module is imported, from the working folder or from what is installed.
        groups: Parameters, or groups of them as PyTorch's optimizers take them.
        arguments: Arguments of the class. A learning rate that it does not take is left out, and so is a group's
            weight decay.

    Raises:
        InputError: The module or the class is not there, it is no optimizer, or it refuses parameters or arguments.
    """
    made = without_its_step(object_named(name, "optimizer", _is_optimizer, "a subclass of torch.optim.Optimizer"))
    taken = inspect.signature(made).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    given = {key: value for key, value in arguments.items() if key != "lr" or key in taken or takes_any}
    groups = list(groups)
    if "weight_decay" not in taken and not takes_any and all(isinstance(group, dict) for group in groups):
        groups = _without_decay(groups)
    try:
        return made(groups, **given)
    except Exception as error:  # of code that is not ours
        raise InputError(f"optimizer {name}: {said_by(error)}: see its own arguments") from error


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer)


def _without_decay(groups: Iterable[Any]) -> list[Any]:
    """Groups that differ in more than their weight decay; else the parameters, since some optimizers take no groups."""
    without = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return without if any(len(group) > 1 for group in without) else [p for group in without for p in group["params"]]
