"""The saved-tensor hooks of an observed block: autograd saves the tensor itself, or a promise to compute it again."""

from typing import NamedTuple

import torch

from tightfit.errors import RecomputeError
from tightfit.levers.recompute.replay import materialise
from tightfit.levers.recompute.values import (
    Geometry,
    Product,
    Root,
    Run,
    has_plain_storage,
    is_aliased,
    modified_in_place,
    product_of,
)
from tightfit.runtime.activity import now


class Promise(NamedTuple):
    """A saved tensor that is recomputed, or fetched from an offload store, when backward unpacks it."""

    product: Product
    geometry: Geometry


class Held(NamedTuple):
    """A saved tensor that is held anyway, with its version: autograd does not check versions of hooked tensors."""

    tensor: torch.Tensor
    version: int


class Late:
    """A saved tensor of a function that still runs. When the function returns, it is held or belongs to a product."""

    __slots__ = ("geometry", "held", "product")

    def __init__(self, tensor: torch.Tensor):
        self.held: torch.Tensor | Held = tensor
        self.product: Product | None = None
        self.geometry: Geometry | None = None

    def promise(self, product: Product, geometry: Geometry) -> None:
        """Let backward compute the tensor again."""
        self.product, self.geometry = product, geometry
        del self.held

    def hold(self) -> None:
        """Hold the tensor, if nothing is decided yet."""
        if self.product is None and isinstance(self.held, torch.Tensor):
            self.held = hold(self.held)

    def settled(self) -> "Promise | Held":
        """What is saved."""
        if self.product is not None and self.geometry is not None:
            return Promise(self.product, self.geometry)
        assert isinstance(self.held, Held), "the function that saved it still runs"
        return self.held


class Awaited:
    """A saved tensor of a run that repeats an earlier one: a geometry over a value of the run."""

    __slots__ = ("__weakref__", "content", "geometry", "product", "run", "value")

    def __init__(self, run: Run, value: int, geometry: Geometry):
        self.run = run
        self.value = value
        self.geometry = geometry
        self.content: torch.Tensor | Root | None = None  # recomputed, or held because the block returned it
        self.product: Product | None = None  # if the run's records were written

    def tensor(self) -> torch.Tensor:
        """The tensor, computed again if necessary."""
        if self.content is None and self.product is None:
            self.run.restore(self.value)
        if self.product is not None:
            return restored(self.product, self.geometry)
        base = self.content.base() if isinstance(self.content, Root) else self.content
        if base is None:
            raise RecomputeError(
                "an earlier backward of this graph ended while it recomputed a block, and what it had used up is gone: "
                "run the forward again"
            )
        return self.geometry.over(base)


def hold(tensor: torch.Tensor) -> Held:
    """A saved tensor that is held."""
    # Without its graph: a saved result would hold the node that saves it, a reference cycle that leaks (as in
    # pytorch#154642).
    return Held(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def pack(tensor: torch.Tensor) -> Promise | Held:
    """Saved-tensor hook: save a held tensor itself, and a promise for any other."""
    if now.on_save is not None:
        now.on_save(tensor)
    storage = tensor.untyped_storage() if has_plain_storage(tensor) else None
    product = None if storage is None else product_of(storage)
    if product is None or product.blank or is_aliased(storage):
        return hold(tensor)
    product.secure(tensor)
    return Promise(product, Geometry.of(tensor))


def unpack(saved: Promise | Held | Late | Awaited) -> torch.Tensor:
    """Saved-tensor hook: return the tensor, computed again if necessary."""
    if isinstance(saved, Awaited):
        if not torch.is_grad_enabled():
            return saved.tensor()
        with torch.no_grad():
            return saved.tensor()
    if isinstance(saved, Late):
        saved = saved.settled()
    if isinstance(saved, Held):
        if saved.tensor._version != saved.version:
            raise modified_in_place(saved.tensor, saved.version)
        return saved.tensor
    if not torch.is_grad_enabled():  # as in most backwards: a context for each saved tensor would take microseconds
        return restored(*saved)
    with torch.no_grad():
        return restored(*saved)


def restored(product: Product, geometry: Geometry) -> torch.Tensor:
    """A value that was not held, as autograd saved it."""
    if product.shown is not None:
        # Code outside of PyTorch has the memory's address. Plain autograd would read whatever is there now.
        return geometry.over(product.shown.base())
    if not product.is_ready:
        materialise(product)
    product.lent = True
    return geometry.over(product.base())
