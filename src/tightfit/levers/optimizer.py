"""Optimizers by name, as PyTorch's own defaults build them."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from tightfit.errors import InputError

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

_KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


def build_optimizer(
    kind: str | OptimizerFactory | torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer over the parameters that are trained.

    `kind` is a name (`adamw`, `adam`, `sgd`, `adafactor`), a callable that takes parameters, or an optimizer whose
    class and settings are taken over, group by group, but not its state. Raises `InputError` for an unknown name.
    """
    trained = [p for p in parameters if p.requires_grad]
    if isinstance(kind, torch.optim.Optimizer):
        return _twin(kind)
    if callable(kind):
        return kind(trained)
    if kind not in _KINDS:
        raise InputError(f"optimizer {kind!r} is not known: choose one of {', '.join(_KINDS)}, or pass an optimizer")
    return _KINDS[kind](trained, **options)


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class over the same parameters and settings, without states."""
    accepted = inspect.signature(type(optimizer)).parameters  # `defaults` holds more than the constructor takes
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return type(optimizer)([dict(group) for group in optimizer.param_groups], **settings)


def host_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """States that lie in host memory while the parameters lie on CUDA: counters of steps, where the optimizer is
    neither fused nor capturable (`_init_group` in torch/optim/adam.py and its neighbours).
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
    """Every tensor of the optimizer's state, after the parameter that it belongs to and the name of the state."""
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            for leaf in tree_iter(value):
                if isinstance(leaf, torch.Tensor):
                    yield parameter, key, leaf
