"""A block of which everything is offloaded, from its second run on: saved-tensor hooks alone, without the recorder.

Nothing of such a block is computed again, so only what autograd saves counts: which of it is offloaded, and which is
held because the block did not compute it. The recorder notes that in one run (`Noting`), and the next ones on inputs of
that kind do the same with each saved tensor, in order (`Again`). Where a run saves something else, the note is dropped,
and the recorder looks again. Every choice is exact, so a note that does not fit costs bytes and nothing else.

A block whose operators write into what was saved before, or that shows its memory to code outside of PyTorch, is always
recorded: its copies must be complete before the write.
"""

import torch

from tightfit.levers.recompute.saved import HeldTensor, Promise, pack
from tightfit.levers.recompute.values import (
    Geometry,
    OffloadStore,
    Product,
    RecordingScope,
    has_plain_storage,
    is_aliased,
    is_exposed,
    product_of,
    set_product,
)

# Of each tensor that autograd saves: None if it is held, or the number of its value and the bytes of its storage.
Saves = tuple[tuple[int, int] | None, ...]


class Noting:
    """Notes what becomes of each saved tensor in a run under the recorder."""

    def __init__(self):
        self.fails = False
        self._saves: list[tuple[int, int] | None] = []
        self._products: dict[int, tuple[int, Product]] = {}  # numbers, by identity; the products are held meanwhile

    def note(self, tensor: torch.Tensor, saved: Promise | HeldTensor) -> None:
        if isinstance(saved, HeldTensor):
            self._saves.append(None)
            return
        number, _ = self._products.setdefault(id(saved.product), (len(self._products), saved.product))
        self._saves.append((number, tensor.untyped_storage().nbytes()))

    def finished(self) -> Saves | None:
        """The note, or None if the block has to be recorded each time."""
        return None if self.fails else tuple(self._saves)


class Again:
    """Does the same with the saved tensors of another run."""

    def __init__(self, saves: Saves, scope: RecordingScope, offload_store: OffloadStore):
        self.differs = False
        self._saves = saves
        self._scope = scope
        self._offload_store = offload_store
        self._place = 0
        self._products: dict[int, Product] = {}

    def save(self, tensor: torch.Tensor) -> Promise | HeldTensor:
        """Saved-tensor hook."""
        place = self._place
        self._place += 1
        entry = self._saves[place] if place < len(self._saves) else None
        product = None if entry is None else self._product(tensor, *entry)
        if product is None:
            saved = pack(tensor)
            self.differs |= entry is not None or place >= len(self._saves) or isinstance(saved, Promise)
            return saved
        product.secure(tensor)
        return Promise(product, Geometry.of(tensor))

    def _product(self, tensor: torch.Tensor, number: int, nbytes: int) -> Product | None:
        """The value of a tensor that is to be offloaded; None if it is not like the one that was noted."""
        if not has_plain_storage(tensor) or (tensor.requires_grad and tensor.is_leaf):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes:
            return None
        product, known = None, self._products.get(number)
        if storage.__dict__:
            if is_aliased(storage) or is_exposed(storage):
                return None
            product = product_of(storage)
        if known is not None:
            return known if product is known else None
        if product is None:
            product = Product(None, self._scope, offload_store=self._offload_store)
            set_product(storage, product)
        elif product.offload_store is None:
            return None  # another value of this run
        self._products[number] = product
        return product

    def close(self) -> bool:
        """The block has returned: whether it saved what was noted."""
        self._products.clear()  # autograd holds this object with its hook, and frees each value by itself
        return not self.differs and self._place == len(self._saves)
