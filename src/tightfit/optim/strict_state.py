"""Loads an optimizer's state strictly: each tensor as it was saved, and an error for everything that does not fit.

`torch.optim.Optimizer.load_state_dict` casts every state to the dtype and the device of its parameter, and does not
check shapes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tightfit.errors import InputError

_NOT_SETTINGS = ("params", "param_names")


class StrictStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose loaded states keep their saved dtype, on the device where this optimizer holds them."""

    def state_device(self, parameter: Tensor, key: str) -> torch.device:
        """The device of a parameter's state."""
        return parameter.device

    def state_shape(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        """The shape of a parameter's state, unless it is a single number."""
        return tuple(parameter.shape)

    def empty_state(self, parameter: Tensor, key: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for a parameter's state, on the device where this optimizer holds it."""
        place = self.state_device(parameter, key)
        if tuple(shape) == tuple(parameter.shape):  # as the optimizer itself allocates it
            return torch.empty_like(parameter, dtype=dtype, device=place, memory_format=torch.preserve_format)
        return torch.empty(shape, dtype=dtype, device=place)

    def states_were_read(self) -> None:
        """Called after a checkpoint was read into the memory of weights and states."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load settings and states, all or nothing.

        Raises `InputError` if the groups, their lengths or the shape of a state do not fit.
        """
        owners = _owners(self.param_groups, state_dict)
        for index, states in state_dict["state"].items():
            _check(self, owners, index, states)  # all of them before the first change
        self.state = defaultdict(dict)
        for index, states in state_dict["state"].items():
            self.state[owners[index]] = {key: self._taken(owners[index], key, value) for key, value in states.items()}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in _NOT_SETTINGS})

    def _taken(self, parameter: Tensor, key: str, value: Any) -> Any:
        """A copy of a saved state on this optimizer's device. Counts of steps stay on theirs."""
        if not isinstance(value, Tensor):
            return value
        # Counts of steps have no dimension. PyTorch keeps them on the CPU, whatever the parameter's device.
        device = value.device if value.dim() == 0 and parameter.dim() > 0 else self.state_device(parameter, key)
        return value.detach().to(device, copy=True)


def _owners(groups: list[dict[str, Any]], state_dict: Mapping[str, Any]) -> dict[Any, Tensor]:
    """The parameter of each index of a saved state. Raises `InputError` if their numbers differ."""
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise InputError(f"load_state_dict: the saved state has {len(saved)} parameter groups, this optimizer has "
                         f"{len(groups)}: build it over the same groups")  # fmt: skip
    owners: dict[Any, Tensor] = {}
    # The lengths are compared first: a `zip` in `load_state_dict` would hide a mismatch and shift all states (torchao).
    for position, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise InputError(
                f"load_state_dict: group {position} of the saved state has {len(other['params'])} parameters, this "
                f"optimizer's has {len(group['params'])}: build it over the same parameters"
            )
        owners.update(zip(other["params"], group["params"], strict=True))
    return owners


def _check(
    optimizer: StrictStateOptimizer, owners: Mapping[Any, Tensor], index: Any, states: Mapping[str, Any]
) -> None:
    if index not in owners:
        raise InputError(f"load_state_dict: the saved state has states of parameter {index}, which is in none of its "
                         "groups: the file is damaged or was edited")  # fmt: skip
    parameter = owners[index]
    for key, value in states.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != optimizer.state_shape(parameter, key):
            raise InputError(
                f"load_state_dict: {key} of parameter {index} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(parameter.shape)}: the state belongs to another model"
            )
