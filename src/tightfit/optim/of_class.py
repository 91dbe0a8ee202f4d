"""Optimizers of other packages and of your own, by the class that `module:Class` names."""

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tightfit.errors import InputError
from tightfit.optim.low_bit import without_its_step
from tightfit.runtime.simulation import host_memory


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
    made = without_its_step(class_named(name))
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


def class_named(name: str) -> type[torch.optim.Optimizer]:
    """The class that `module:Class` names. Raises `InputError` where it is not there or is no optimizer."""
    module_name, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with host_memory():  # tables that a package makes when it is imported are not the step's
            found: Any = importlib.import_module(module_name)
    except Exception as error:  # importing runs code that is not ours
        raise InputError(
            f"optimizer {name}: the module {module_name!r} cannot be imported ({type(error).__name__}: {error}): "
            "install it, or run in the folder that holds it"
        ) from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        what = "is not there" if found is None else "is no subclass of torch.optim.Optimizer"
        raise InputError(f"optimizer {name}: {path} {what} in {module_name}: name a class of an optimizer")
    return found


def _without_decay(groups: Iterable[Any]) -> list[Any]:
    """Groups that differ in more than their weight decay; else the parameters, since some optimizers take no groups."""
    without = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return without if any(len(group) > 1 for group in without) else [p for group in without for p in group["params"]]
