"""Refuses second derivatives of backward passes that do not support them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightfit.errors import InputError

Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(name: str | None = None) -> Callable[[Backward], Backward]:
    """Decorate an `autograd.Function`'s backward so that differentiating its results raises.

    The error names `name`, or `ctx.name` where one function serves several operators.

    PyTorch's `once_differentiable` checks the incoming gradient only. If that is a constant, as for a loss, the results
    are constants too, and a gradient penalty silently lacks their part.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def guarded(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not torch.is_grad_enabled():
                return results
            return tuple(
                None if result is None else NoSecondDerivative.apply(leaf(result), name or ctx.name)
                for result in results
            )

        return guarded

    return decorate


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


class NoSecondDerivative(torch.autograd.Function):
    """The identity, whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InputError(f"{ctx.name}: cannot be differentiated twice: use the plain version for second derivatives")
