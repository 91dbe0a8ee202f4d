"""Optimizers of other packages and of your own, by the class that `module:Class` names."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tightfit.errors import InputError
from tightfit.optim.low_bit import without_its_step
from tightfit.runtime.users_code import object_named


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
        reason = " ".join(str(error).split())
        raise InputError(f"optimizer {name}: {type(error).__name__}: {reason}: see its own arguments") from error


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer)


def _without_decay(groups: Iterable[Any]) -> list[Any]:
    """Groups that differ in more than their weight decay; else the parameters, since some optimizers take no groups."""
    without = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return without if any(len(group) > 1 for group in without) else [p for group in without for p in group["params"]]
