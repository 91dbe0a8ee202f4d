"""Gated activations that save only their two inputs.

Under autograd, `F.silu(gate) * up` saves gate, up and silu(gate) for backward. Here backward recomputes silu(gate) by
the operators that autograd itself would use, so output and gradients are bit-equal.
Mathematics: Shazeer 2020, "GLU variants improve transformer".
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import InputError

__all__ = ["geglu", "plain_geglu", "plain_swiglu", "swiglu"]

aten = torch.ops.aten


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, saving only gate and up for backward.

    Result and gradients are bit-equal to those of `F.silu(gate) * up`. Can be differentiated twice.

    Args:
        gate: Any shape, any floating dtype.
        up: The same shape, any floating dtype.

    Returns:
        A tensor of that shape, in the promoted dtype.

    Raises:
        InputError: The shapes differ, or a dtype is not floating.

    Example:
        >>> import torch
        >>> from tightfit.ops import swiglu
        >>> gate, up = torch.randn(2, 8), torch.randn(2, 8)
        >>> torch.equal(swiglu(gate, up), torch.nn.functional.silu(gate) * up)
        True
    """
    check_inputs("swiglu", gate, up)
    return gated(gate, up, Silu())


def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Compute gelu(gate) * up, saving only gate and up for backward.

    Result and gradients are bit-equal to those of `F.gelu(gate, approximate=approximate) * up`. Can be differentiated
    twice.

    Args:
        gate: Any shape, any floating dtype.
        up: The same shape, any floating dtype.
        approximate: `"none"` is the exact GELU, gate * Φ(gate) by the error function. `"tanh"` is its approximation
            (Hendrycks and Gimpel 2016).

    Returns:
        A tensor of that shape, in the promoted dtype.

    Raises:
        InputError: The shapes differ, or a dtype is not floating.

    Example:
        >>> import torch
        >>> from tightfit.ops import geglu
        >>> gate, up = torch.randn(2, 8), torch.randn(2, 8)
        >>> torch.equal(geglu(gate, up), torch.nn.functional.gelu(gate) * up)
        True
    """
    check_inputs("geglu", gate, up)
    if approximate not in ("none", "tanh"):
        raise InputError(f"geglu: approximate={approximate!r} is unknown: use 'none' or 'tanh'")
    return gated(gate, up, Gelu(approximate))


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The reference for `swiglu`."""
    return F.silu(gate) * up


def plain_geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """The reference for `geglu`."""
    return F.gelu(gate, approximate=approximate) * up


def check_inputs(name: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape:
        raise InputError(
            f"{name}: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape: give both the same shape"
        )
    for argument, tensor in (("gate", gate), ("up", up)):
        if not tensor.is_floating_point():
            raise InputError(f"{name}: {argument} is {tensor.dtype}: give a floating-point tensor")


class Silu:
    """x * sigmoid(x) (Elfwing et al. 2018)."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def gradient_(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, written over `gradient` unless autograd records."""
        if torch.is_grad_enabled():  # autograd's own formula, which can be differentiated again
            sigmoid = torch.sigmoid(x)
            return gradient * sigmoid * (1.0 + x * (1.0 - sigmoid))
        return aten.silu_backward.grad_input(gradient, x, grad_input=gradient)


class Gelu:
    """x * Φ(x), or its approximation by tanh (Hendrycks and Gimpel 2016)."""

    def __init__(self, approximate: str):
        self.approximate = approximate

    def __call__(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)

    def gradient_(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, written over `gradient` unless autograd records."""
        if torch.is_grad_enabled():  # the functional form, which can be differentiated again
            return aten.gelu_backward.default(gradient, x, approximate=self.approximate)
        return aten.gelu_backward.grad_input(gradient, x, approximate=self.approximate, grad_input=gradient)


class Gated(torch.autograd.Function):
    """activation(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Silu | Gelu) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return product_(activation(gate), up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        (gradient,) = gradients
        of_gate = of_up = None
        if ctx.needs_input_grad[1]:
            of_up = product_(ctx.activation(gate), gradient).to(up.dtype)
        if ctx.needs_input_grad[0]:
            of_gate = ctx.activation.gradient_((gradient * up).to(gate.dtype), gate)
        return of_gate, of_up, None


def gated(gate: Tensor, up: Tensor, activation: Silu | Gelu) -> Tensor:
    result: Any = Gated.apply(gate, up, activation)
    return result


def product_(own: Tensor, other: Tensor) -> Tensor:
    """own * other, written over `own` if dtypes and autograd allow it. Nothing else holds `own`."""
    return own * other if torch.is_grad_enabled() or own.dtype != other.dtype else own.mul_(other)
