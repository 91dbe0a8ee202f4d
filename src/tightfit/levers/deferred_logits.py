"""Logits that are materialised only on use, and never for a cross-entropy.

A head with the lever returns `DeferredLogits` instead of its product. Operations that do not touch the vocabulary
(slices of batch and sequence, views, a cast to fp32) give deferred logits again. `F.cross_entropy` becomes the chunked
loss. Any other use materialises the logits and continues with them.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from tightfit.errors import LeverError
from tightfit.levers.leading_views import LEADING_VIEWS
from tightfit.ops.cross_entropy import linear_cross_entropy
from tightfit.ops.head_loss import product_dtype


class DeferredHead:
    """The deferred product hidden (..., D) @ weight (V, D).T + bias (V), with the state in which the head ran.

    That state is the inputs, their versions, and autocast. `family` refers weakly to all logits derived from it.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None):
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.chunk_size = chunk_size
        device = hidden.device.type
        self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.dtype = product_dtype(hidden)
        self.versions = self.current_versions()
        self.loss_taken = False
        self.family: list[weakref.ref[DeferredLogits]] = []

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def current_versions(self) -> tuple[int, ...]:
        return tuple(t._version for t in (self.hidden, self.weight, self.bias) if t is not None)

    def precision(self) -> AbstractContextManager[Any]:
        """A context with the autocast state in which the head ran: a loss may be computed outside of autocast."""
        enabled, dtype = self.autocast
        return torch.autocast(self.hidden.device.type, dtype, enabled=enabled)

    def check_unchanged(self) -> None:
        # The deferred product reads weights at the time of use. After a write it would silently differ from the plain
        # head's product.
        if self.versions != self.current_versions():
            raise LeverError(
                "chunked loss: the logits are needed only now, but the head's weight or its input was written to since "
                "(an optimizer step?): read the logits before that, or undo the lever"
            )

    def logits(self) -> Tensor:
        """The logits, as the head would have computed them."""
        self.check_unchanged()
        with torch.enable_grad(), self.precision():  # the head ran with gradients, even if the reader does not
            return F.linear(self.hidden, self.weight, self.bias)

    def materialise(self) -> None:
        """Compute the logits and everything derived from them so far."""
        # All of them at once: slices of plain logits share memory, so a write into one must be visible in the others.
        for reference in list(self.family):
            member = reference()
            if member is not None:
                member.compute()


@dataclass(frozen=True)
class Origin:
    """How deferred logits were derived from others: operation, further arguments, and whether grad was enabled."""

    parent: "DeferredLogits"
    operation: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    watched: bool

    def compute(self) -> Tensor:
        assert self.parent.content is not None, "parents are computed first"
        with torch.set_grad_enabled(self.watched):
            return self.operation(self.parent.content, *self.args, **self.kwargs)


class DeferredProduct(torch.autograd.Function):
    """The autograd node of deferred logits, for C++ code that uses the tensor without calling `__torch_function__`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, product: torch.dtype, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.product = product
        shape = (*hidden.shape[:-1], weight.shape[0])
        return Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        rows = gradients[0].to(ctx.product).flatten(0, -2)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        return (
            (rows @ weight.to(ctx.product)).view(hidden.shape).to(hidden.dtype) if of_hidden else None,
            (rows.mT @ hidden.to(ctx.product).flatten(0, -2)).to(weight.dtype) if of_weight else None,
            rows.sum(dim=0).to(bias.dtype) if of_bias else None,
            None,
            None,
        )


class DeferredLogits(Tensor):
    """A tensor (..., V) without memory that can compute its content.

    `hidden` (..., D) are the hidden states of its tokens. `content` are the logits once they are materialised.
    """

    head: DeferredHead
    hidden: Tensor
    origin: Origin | None
    content: Tensor | None

    @staticmethod
    def of(head: DeferredHead, hidden: Tensor, dtype: torch.dtype, origin: Origin | None = None) -> "DeferredLogits":
        deferred: Any = DeferredProduct.apply(hidden, head.weight, head.bias, head.dtype, dtype)
        deferred.head, deferred.hidden, deferred.origin, deferred.content = head, hidden, origin, None
        head.family.append(weakref.ref(deferred))
        return deferred

    def compute(self) -> None:
        if self.content is None:
            self.content = self.head.logits() if self.origin is None else self.origin.compute()

    def materialise(self) -> Tensor:
        """The real logits (..., V), computed at most once."""
        if self.content is None:
            self.head.materialise()
        assert self.content is not None, "every member of the family is computed"
        return self.content

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)  # F.cross_entropy(input=logits, target=labels)
        if args and isinstance(args[0], DeferredLogits) and args[0].content is None:
            result = still_deferred(args[0], func, args[1:], kwargs)
            if result is not None:
                return result
        if func is Tensor.register_hook and looks_at_no_gradient(args[1]) and args[0].content is None:
            hidden = args[0].hidden
            return hidden.register_hook(args[1]) if hidden.requires_grad else None
        # The chunked loss computed the gradient of the hidden states directly, so the logits never had a gradient. A
        # hook would wait for it in vain.
        if func in _OBSERVES_GRADIENT and any(
            isinstance(leaf, DeferredLogits) and leaf.head.loss_taken for leaf in tree_iter((args, kwargs))
        ):
            raise LeverError(
                "chunked loss: the gradient of the logits is requested, but the loss was computed without them: "
                "request it before the loss, or undo the lever"
            )
        args, kwargs = computed(DeferredLogits.materialise, args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Reached when C++ code uses the tensor. The gradient then runs through `DeferredProduct`.
        args, kwargs = computed(values, args, {} if kwargs is None else kwargs)
        return func(*args, **kwargs)


def divided(logits: Tensor, divisor: float) -> Tensor:
    """`logits / divisor`, equal to rounding; deferred logits stay deferred: their hidden states are divided instead."""
    if divisor == 1.0:
        return logits
    if not isinstance(logits, DeferredLogits) or logits.content is not None:
        return logits / divisor
    head = logits.head
    head.check_unchanged()
    hidden, bias = logits.hidden / divisor, None if head.bias is None else head.bias / divisor
    made = DeferredHead(hidden, head.weight, bias, head.chunk_size)
    made.autocast, made.dtype = head.autocast, head.dtype
    return DeferredLogits.of(made, hidden, logits.dtype)


def looks_at_no_gradient(hook: Any) -> bool:
    """True for a hook on a module's results that waits for their backward, and reads nothing.

    FSDP2 gathers weights then; a function with the attribute `only_waits` says so itself.
    """
    is_of_fsdp2 = type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")
    return is_of_fsdp2 or getattr(hook, "only_waits", False)


def computed(how: Callable[[DeferredLogits], Tensor], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """The arguments with logits in place of deferred logits."""
    return tree_map_only(DeferredLogits, how, args), tree_map_only(DeferredLogits, how, kwargs)


def values(logits: DeferredLogits) -> Tensor:
    """The content of deferred logits, for use below autograd and autocast."""
    if logits.content is not None:
        return logits.content.detach()
    head = logits.head
    head.check_unchanged()
    bias = None if head.bias is None else head.bias.to(head.dtype)
    return F.linear(logits.hidden.to(head.dtype), head.weight.to(head.dtype), bias).to(logits.dtype).detach()


def still_deferred(logits: DeferredLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The result of `func(logits, ...)` without materialising the logits, or None if `func` needs them."""
    if func is F.cross_entropy:
        return cross_entropy(logits, *args, **kwargs)
    if func in LEADING_VIEWS:
        hidden, dtype = LEADING_VIEWS[func](logits.hidden, logits.head.vocabulary, *args, **kwargs), logits.dtype
    else:
        hidden, dtype = logits.hidden, cast_dtype(logits, func, args, kwargs)
    if hidden is None or dtype is None:
        return None
    if hidden is logits.hidden and dtype == logits.dtype:
        return logits
    return DeferredLogits.of(logits.head, hidden, dtype, Origin(logits, func, args, kwargs, torch.is_grad_enabled()))


def cast_dtype(logits: DeferredLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype after `.float()` or `.to(...)`, or None if the cast loses precision or changes the device."""
    if func is Tensor.float and not args and not kwargs:
        wanted = torch.float32
    elif func is Tensor.to and set(kwargs) <= {"dtype", "device", "non_blocking"} and len(args) < 3:
        named = [value for name, value in kwargs.items() if name != "non_blocking"]
        targets = [logits.device if target is None else target for target in (*args, *named)]
        wanted = next((target for target in targets if isinstance(target, torch.dtype)), logits.dtype)
        if any(t != wanted and not is_device_of(logits, t) for t in targets):
            return None
    else:
        return None
    # Widening to fp32 keeps everything that the logits hold. Narrowing would round them, which the loss would not see.
    widened = wanted == torch.float32 and logits.dtype != torch.float64
    return wanted if wanted == logits.dtype or widened else None


def is_device_of(logits: DeferredLogits, target: Any) -> bool:
    return isinstance(target, str | torch.device) and torch.device(target) == logits.device


def cross_entropy(
    logits: DeferredLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` in chunks. None for class weights, soft targets, and arguments that PyTorch would refuse."""
    if weight is not None or size_average is not None or reduce is not None:
        return None
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.shape != logits.hidden.shape[:1]:
        return None
    if logits.hidden.dim() != 2:
        return None
    head = logits.head
    head.check_unchanged()
    with head.precision():
        loss = linear_cross_entropy(
            logits.hidden,
            head.weight,
            target,
            bias=head.bias,
            ignore_index=ignore_index,
            reduction=reduction,  # pyright: ignore[reportArgumentType] (checked there)
            label_smoothing=label_smoothing,
            chunk_size=head.chunk_size,
        )
    head.loss_taken = True
    # PyTorch's own loss has the logits' dtype, except under autocast, which computes it in fp32.
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(logits.dtype)


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


# Questions that need no content: the tensor without memory answers them.
_METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "itemsize", "nbytes"),
    *_getters("requires_grad", "is_leaf", "grad_fn", "is_sparse", "is_quantized", "is_nested", "_version", "_base"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.stride, Tensor.is_contiguous),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.__hash__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_OBSERVES_GRADIENT = {Tensor.retain_grad, Tensor.register_hook, torch.autograd.grad}
