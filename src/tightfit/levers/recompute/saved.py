"""What autograd holds for backward inside a watched block: the tensor itself, or a promise to bring it back."""

from typing import NamedTuple

import torch

from tightfit.levers.recompute.replay import materialise
from tightfit.levers.recompute.values import (
    Geometry,
    Product,
    has_plain_storage,
    is_aliased,
    modified_in_place,
    product_of,
)
from tightfit.runtime.activity import now


class Promise(NamedTuple):
    """What autograd holds in place of a saved tensor: it is computed again, or fetched, when asked for."""

    product: Product
    geometry: Geometry


class Held(NamedTuple):
    """A saved tensor that is held anyway, and its version, which autograd does not check behind hooks."""

    tensor: torch.Tensor
    version: int


def pack(tensor: torch.Tensor) -> Promise | Held:
    """Saved-tensor hook: hold what is held anyway, promise the rest."""
    if now.on_save is not None:
        now.on_save(tensor)
    storage = tensor.untyped_storage() if has_plain_storage(tensor) else None
    product = None if storage is None else product_of(storage)
    if product is None or product.blank or is_aliased(storage):
        # Without its graph: a saved result would hold the very node that holds it.
        return Held(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
    product.secure(tensor)
    return Promise(product, Geometry.of(tensor))


def unpack(saved: Promise | Held) -> torch.Tensor:
    """Saved-tensor hook: the tensor itself, computed again if need be."""
    if isinstance(saved, Held):
        if saved.tensor._version != saved.version:
            raise modified_in_place(saved.tensor, saved.version)
        return saved.tensor
    product, geometry = saved
    with torch.no_grad():
        if product.shown is not None:
            return geometry.over(product.shown.base())
        materialise(product)
        product.lent = True
        return geometry.over(product.base())
