"""Logits that are not computed until somebody needs them, and never where a cross-entropy takes them in.

A head that defers returns `DeferredLogits` in the place of its product. Whatever keeps the vocabulary last (slices
of batch and sequence, views, casts) stays deferred; `F.cross_entropy` becomes the chunked loss; anything else
computes the logits and goes on as if nothing had been deferred.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tightfit.ops.cross_entropy import linear_cross_entropy, product_dtype


@dataclass(frozen=True)
class Recipe:
    """How to compute logits: `hidden` (..., D), `weight` (V, D), `bias` (V,) or None, and the casts that followed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk_size: int | None
    autocast: tuple[bool, torch.dtype]  # as it was when the head ran
    casts: tuple[torch.dtype, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        if self.casts:
            return self.casts[-1]
        with self.precision():
            return product_dtype(self.hidden)

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast state in which the head ran."""
        enabled, dtype = self.autocast
        return torch.autocast(self.hidden.device.type, dtype, enabled=enabled)

    def logits(self) -> Tensor:
        """The real logits, as the head would have computed them."""
        with self.precision():
            logits = F.linear(self.hidden, self.weight, self.bias)
        for dtype in self.casts:
            logits = logits.to(dtype)
        return logits

    def cross_entropy(self, labels: Tensor, **options: Any) -> Tensor:
        """The chunked loss; `hidden` has two dimensions."""
        with self.precision():
            return linear_cross_entropy(
                self.hidden, self.weight, labels, bias=self.bias, chunk_size=self.chunk_size, **options
            )


class DeferredLogits(Tensor):
    """A tensor without memory that knows how its content would be computed."""

    recipe: Recipe
    computed: Tensor | None

    @staticmethod
    def of(recipe: Recipe) -> "DeferredLogits":
        deferred = Tensor._make_wrapper_subclass(
            DeferredLogits, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device, requires_grad=False
        )
        deferred.recipe = recipe
        deferred.computed = None
        return deferred

    def materialise(self) -> Tensor:
        """The real logits, computed once."""
        if self.computed is None:
            self.computed = self.recipe.logits()
        return self.computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if func in _REQUIRES_GRAD:
            return True
        handler = _DEFERRED.get(func)
        first = args[0] if args else kwargs.get("input")
        if handler is not None and isinstance(first, DeferredLogits) and first.computed is None:
            result = handler(first, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
            if result is not None:
                return result
        return _with_real_logits(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _with_real_logits(func, args, kwargs or {})


def _with_real_logits(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.materialise, (args, kwargs))
    return func(*args, **kwargs)


# What stays deferred. A handler returns None where its arguments touch the vocabulary, and the logits are computed.


def _sliced(logits: DeferredLogits, index: Any) -> DeferredLogits | None:
    entries = index if isinstance(index, tuple) else (index,)
    if any(isinstance(entry, list | range) for entry in entries):
        return None
    if _touches_last(entries, logits.recipe.hidden.dim()):
        return None
    return DeferredLogits.of(replace(logits.recipe, hidden=logits.recipe.hidden[index]))


def _touches_last(entries: tuple, dims: int) -> bool:
    """Whether an index reaches the last dimension with more than a full slice."""
    position = next((i for i, entry in enumerate(entries) if entry is Ellipsis), None)
    before = entries if position is None else entries[:position]
    after = () if position is None else entries[position + 1 :]
    if _consumed(before) >= dims:
        return True
    consuming = [entry for entry in after if entry is not None]
    return bool(consuming) and not (isinstance(consuming[-1], slice) and consuming[-1] == slice(None))


def _consumed(entries: tuple) -> int:
    """How many dimensions these index entries take up."""
    return sum(_width(entry) for entry in entries)


def _width(entry: Any) -> int:
    if entry is None:
        return 0
    is_mask = isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.dim() if is_mask else 1


def _viewed(logits: DeferredLogits, *shape: Any, **named: Any) -> DeferredLogits | None:
    wanted = tuple(named.get("shape", named.get("size", shape)))
    if len(wanted) == 1 and isinstance(wanted[0], tuple | list | torch.Size):
        wanted = tuple(wanted[0])
    if not wanted or not all(isinstance(size, int) for size in wanted):
        return None
    vocabulary, count = logits.recipe.shape[-1], logits.recipe.hidden.shape[:-1].numel()
    if wanted[-1] == -1:
        rest = torch.Size(wanted[:-1]).numel()
        wanted = (*wanted[:-1], count * vocabulary // rest if rest > 0 else -1)
    if len(wanted) < 2 or wanted[-1] != vocabulary:
        return None
    hidden = logits.recipe.hidden
    return DeferredLogits.of(replace(logits.recipe, hidden=hidden.reshape(*wanted[:-1], hidden.shape[-1])))


def _flattened(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits | None:
    dims = logits.recipe.hidden.dim()
    if end_dim % dims == dims - 1:
        return None
    return DeferredLogits.of(replace(logits.recipe, hidden=logits.recipe.hidden.flatten(start_dim, end_dim)))


def _same(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    return None if args or kwargs else logits


def _cast(dtype: torch.dtype) -> Callable[..., DeferredLogits]:
    def cast(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits:
        return _casted(logits, dtype)

    return cast


def _casted(logits: DeferredLogits, dtype: torch.dtype) -> DeferredLogits:
    if dtype == logits.recipe.dtype:
        return logits
    return DeferredLogits.of(replace(logits.recipe, casts=(*logits.recipe.casts, dtype)))


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    given = [*args, *kwargs.values()]
    target = given[0] if len(given) == 1 else None
    return _casted(logits, target) if isinstance(target, torch.dtype) and target.is_floating_point else None


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    plain = weight is None and size_average is None and reduce is None
    widens = all(cast.itemsize >= logits.recipe.dtype.itemsize or cast == torch.float32 for cast in logits.recipe.casts)
    if not plain or not widens or logits.recipe.hidden.dim() != 2 or target.is_floating_point():
        return None
    loss = logits.recipe.cross_entropy(
        target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    # PyTorch's own loss has the logits' dtype, except under autocast, which computes it in fp32.
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(logits.recipe.dtype)


_DEFERRED: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _sliced,
    Tensor.view: _viewed,
    Tensor.reshape: _viewed,
    torch.reshape: _viewed,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.contiguous: _same,
    Tensor.float: _cast(torch.float32),
    Tensor.double: _cast(torch.float64),
    Tensor.bfloat16: _cast(torch.bfloat16),
    Tensor.half: _cast(torch.float16),
    Tensor.to: _to,
    F.cross_entropy: _cross_entropy,
}


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_METADATA = {
    *(_getter(name) for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.stride, Tensor.is_contiguous),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.__hash__),
}
_REQUIRES_GRAD = {_getter("requires_grad")}
