"""A gradient in host memory while its parameter is on the device.

It is the parameter's `.grad`. Operators that read or scale it (clipping, a gradient scaler, the sum over micro-batches)
run in host memory, and their results are in host memory too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tightfit.memory.allocator import rest
from tightfit.optim.link import Link
from tightfit.runtime.internals import no_torch_function, tensor_without_memory
from tightfit.runtime.simulation import host_memory

aten = torch.ops.aten
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
# Of clipping. On the host PyTorch takes one gradient after another too.
_EACH_BY_ITSELF = (aten._foreach_norm.Scalar, aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar)


class HostGradient(Tensor):
    """A parameter's gradient in host memory. It reports the shape, dtype and device that PyTorch requires.

    `target` is memory for it in a file. Such a gradient is there, and out of memory again, when this returns.
    """

    __torch_function__: Any = no_torch_function

    @staticmethod
    def __new__(cls, gradient: Tensor, link: Link, target: Tensor | None = None) -> "HostGradient":
        return tensor_without_memory(cls, gradient, gradient.stride())

    def __init__(self, gradient: Tensor, link: Link, target: Tensor | None = None):
        self._link, self._in_file = link, target is not None
        self._host = link.to_host(gradient, target)
        self._arriving: Tensor | None = None  # another micro-batch's gradient, added when its copy is complete
        if self._in_file:
            self._rest()

    def add(self, gradient: Tensor) -> None:
        """Add another micro-batch's gradient."""
        # On CUDA the sum is made on the next read, so that the copy runs in parallel with backward: but not of one in a
        # file, since all that arrive would be in memory.
        host = self.host()
        if self._link.is_concurrent:
            self._arriving = self._link.to_host(gradient)
        else:
            host.add_(gradient)
        if self._in_file:
            self._rest()

    def _rest(self) -> None:
        rest(self.host())
        self._link.in_file(self._host)

    def host(self) -> Tensor:
        """The gradient in host memory, after all copies. Writing into it changes the gradient."""
        self._link.wait(self._host)
        if self._arriving is not None:
            self._link.wait(self._arriving)
            with host_memory():
                self._host.add_(self._arriving)
            self._arriving = None
        return self._host

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"HostGradient({self.host()!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is aten.detach.default:
            return first._alias()
        if func is aten.add_.Tensor and isinstance(first, cls) and not kwargs and _is_whole(args[1], first):
            first.add(args[1])
            return first
        if func is _UNSCALE:
            return _unscale(*args)
        with host_memory():
            if func in _EACH_BY_ITSELF and not kwargs:
                return _each(func, first, tree_map(_on_host, args[1:]))
            out = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        return first if func._schema.is_mutable and isinstance(first, cls) else out

    def _alias(self) -> "HostGradient":
        """A second tensor over the same memory."""
        self.host()
        alias = HostGradient.__new__(HostGradient, self, self._link)
        alias._link, alias._in_file = self._link, self._in_file
        alias._host, alias._arriving = self._host, None
        return alias


def _is_whole(other: Any, gradient: Tensor) -> bool:
    """True if `other` is a plain tensor of the gradient's shape and dtype, as autograd adds them."""
    plain = isinstance(other, Tensor) and not isinstance(other, HostGradient)
    return plain and other.shape == gradient.shape and other.dtype == gradient.dtype


def _on_host(item: Any) -> Any:
    if isinstance(item, HostGradient):
        return item.host()
    return item.cpu() if isinstance(item, Tensor) else item


def _each(func: Any, gradients: Any, arguments: Any) -> list[Tensor] | None:
    """Run an operator on one gradient after another: of those in a file one is in memory at a time."""
    found = []
    for gradient in gradients:
        host = _on_host(gradient)
        found += func([host], *arguments) or ()
        rest(host)
    return found or None


def _unscale(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """`GradScaler.unscale_` for gradients on the host and on the device. Both report into one `found_inf`."""
    there = [g for g in gradients if not isinstance(g, HostGradient)]
    here = [g.host() for g in gradients if isinstance(g, HostGradient)]
    if there:
        _UNSCALE(there, found_inf, inverse_scale)
    found_here = found_inf.cpu()
    with host_memory():
        _UNSCALE(here, found_here, inverse_scale.cpu())
    if found_here is not found_inf:
        found_inf.copy_(found_here)
