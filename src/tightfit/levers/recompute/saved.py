"""The saved-tensor hooks of an observed block: autograd saves the tensor itself, or a promise to compute it again."""

from typing import NamedTuple

import torch

from tightfit.levers.activity import activity
from tightfit.levers.recompute.replay import materialise
from tightfit.levers.recompute.values import (
    Geometry,
    Product,
    has_plain_storage,
    is_aliased,
    modified_in_place,
    present,
    product_of,
)


class Promise(NamedTuple):
    """A saved tensor that is recomputed, or fetched from an offload store, when backward unpacks it."""

    product: Product
    geometry: Geometry


class HeldTensor(NamedTuple):
    """A saved tensor that is held anyway, with its version: autograd does not check versions of hooked tensors."""

    tensor: torch.Tensor
    version: int


def hold(tensor: torch.Tensor) -> HeldTensor:
    """A saved tensor that is held."""
    # Without its graph: a saved result would hold the node that saves it, a reference cycle that leaks (as in
    # pytorch#154642).
    return HeldTensor(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def pack(tensor: torch.Tensor) -> Promise | HeldTensor:
    """Saved-tensor hook: save a held tensor itself, and a promise for any other."""
    if activity.on_save is not None:
        activity.on_save(tensor)
    storage = tensor.untyped_storage() if has_plain_storage(tensor) else None
    product = None if storage is None else product_of(storage)
    if product is None or product.blank or is_aliased(storage):
        return hold(tensor)
    product.secure(tensor)
    return Promise(product, Geometry.of(tensor))


def unpack(saved: Promise | HeldTensor) -> torch.Tensor:
    """Saved-tensor hook: return the tensor, computed again if necessary."""
    if isinstance(saved, HeldTensor):
        if saved.tensor._version != saved.version:
            raise modified_in_place(saved.tensor, saved.version)
        return present(saved.tensor)
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
