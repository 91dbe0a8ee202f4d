"""One step of AdamW on tensors of any device, by PyTorch's own arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tightfit.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay")


def settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """A group's settings as a dict. Raises `InputError` if one is out of range."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise InputError(f"{name} is {value!r}: it must be zero or more")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"betas is {betas!r}: two numbers, each from 0 to below 1")
    return {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}


def new_moments(weight: Tensor, empty: Callable[[], Tensor] | None = None) -> dict[str, Tensor]:
    """The states before the first step: the count of steps, and both moments, in the weight's dtype and device.

    `empty` makes the memory of a moment, if the weight's allocator does not.
    """
    zeros = partial(torch.zeros_like, weight, memory_format=torch.preserve_format)
    moments = {key: zeros() if empty is None else empty() for key in MOMENTS}
    if empty is not None:
        for moment in moments.values():
            moment.data.zero_()  # no write that is counted: new states have none
    return {"step": torch.tensor(0.0, dtype=torch.float32), **moments}


def adamw_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Any]],
    group: Mapping[str, Any],
    *,
    foreach: bool | None = None,
    fused: bool | None = None,
) -> None:
    """Update `weights` and `states` in place (Loshchilov and Hutter 2019, "Decoupled weight decay regularization")."""
    beta1, beta2 = group["betas"]
    adamw(
        list(weights),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        foreach=foreach,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if fused:  # that kernel does not count its writes, by which levers and recovery see them
        written = [*weights, *(state[key] for state in states for key in MOMENTS)]
        torch.autograd.graph.increment_version(written)
