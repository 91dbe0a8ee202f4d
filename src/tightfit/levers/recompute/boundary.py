"""The tensors that cross the boundary of an observed block: its inputs, which may be offloaded, and its results."""

from typing import Any

from torch.utils.weak import TensorWeakRef

from tightfit.levers.recompute.values import (
    OffloadStore,
    Product,
    RecordingScope,
    has_plain_storage,
    hold_memory,
    is_aliased,
    is_exposed,
    product_of,
    set_product,
)
from tightfit.runtime.nested import tensors_in


def enter(inputs: Any, scope: RecordingScope, offload_store: OffloadStore) -> None:
    """Mark the block's inputs that the model computed for offload.

    Masks, positions and the model's own inputs are not offloaded, because others hold them anyway.
    """
    for tensor in tensors_in(inputs):
        if tensor.grad_fn is None or not has_plain_storage(tensor):
            continue
        storage = tensor.untyped_storage()
        is_ours = product_of(storage) is None and not is_exposed(storage) and not is_aliased(storage)
        if is_ours and storage.nbytes() >= offload_store.smallest_bytes:
            set_product(storage, Product(None, scope, offload_store=offload_store))


def leave(outputs: Any, *, held: bool) -> None:
    """Prepare the block's results for its caller.

    With `held`, the caller holds their memory from now on. Otherwise (within a segment) they remain recomputable as
    long as nobody writes into them.
    """
    for tensor in tensors_in(outputs):
        if not has_plain_storage(tensor):
            continue
        storage = tensor.untyped_storage()
        product = product_of(storage)
        if product is None:
            continue
        product.settle()
        if held:
            hold_memory(product, tensor)
        else:
            # Outside of the block no recorder sees writes. The version counter then shows whether there was one.
            product.left_as = (*product.left_as, (TensorWeakRef(tensor), tensor._version))
