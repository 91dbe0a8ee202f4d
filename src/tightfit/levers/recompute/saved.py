"""The saved-tensor hooks of an observed block: autograd saves the tensor itself, or a promise to compute it again."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
from tightfit.runtime.internals import innermost_saved_tensor_hooks


class Promise(NamedTuple):
    """A saved tensor that is recomputed, or fetched from an offload store, when backward unpacks it."""

    product: Product
    geometry: Geometry


class HeldTensor(NamedTuple):
    """A saved tensor that is held anyway, with its version: autograd does not check versions of hooked tensors."""

    tensor: torch.Tensor
    version: int


class Passed(NamedTuple):
    """A saved tensor that goes through the hooks of a context around the block as well, as in the plain run.

    Those hooks may change numbers: some save in fewer bits. `save` has run already where it is None. A promise goes
    through it once its value is there.
    """

    saved: Any
    save: Callable[[torch.Tensor], Any] | None
    load: Callable[[Any], torch.Tensor]


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
# Checkpoints save nothing of what runs within: what a block in them keeps is ours.
_WITHOUT_NUMBERS = ("torch.utils.checkpoint", "tightfit.")


def hooks_around() -> Hooks | None:
    """The saved-tensor hooks that other code set around the block that begins now, if the plain run calls them."""
    hooks = innermost_saved_tensor_hooks()
    if hooks is None:
        return None
    outer = getattr(getattr(hooks[0], "__self__", None), "around", None)  # a block around this one
    if outer is not None:
        return outer
    return None if (getattr(hooks[0], "__module__", None) or "").startswith(_WITHOUT_NUMBERS) else hooks


def pass_on(tensor: torch.Tensor, saved: Promise | HeldTensor, around: Hooks) -> Passed:
    """A saved tensor of a block, for the hooks around it."""
    save, load = around
    return Passed(saved, save, load) if isinstance(saved, Promise) else Passed(save(tensor), None, load)


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


def unpack(saved: Promise | HeldTensor | Passed) -> torch.Tensor:
    """Saved-tensor hook: return the tensor, computed again if necessary."""
    if isinstance(saved, Passed):
        return saved.load(saved.saved if saved.save is None else saved.save(unpack(saved.saved)))
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
