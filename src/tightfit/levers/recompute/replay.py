"""Computes products again, as few operators as the asked-for value needs, in their original order."""

import sys
from collections import deque

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tightfit.activity import recomputation
from tightfit.internals import NoAutocast
from tightfit.levers.recompute.values import Operation, Product, Reference, copy_of_storage


def materialise(product: Product) -> None:
    """Fill `product.content`.

    Recomputed values that autograd still waits for stay filled until it lets go of them; others go as soon as the
    last operator that reads them has run.
    """
    if product.content is not None:
        return
    pending = needed_operations(product)
    with torch.no_grad(), NoAutocast(), recomputation():
        while pending:
            rerun(pending.popleft())


def needed_operations(product: Product) -> deque[Operation]:
    """The operations to run, oldest first."""
    found: dict[int, Operation] = {}
    waiting = [product.producer]
    while waiting:
        operation = waiting.pop()
        if operation is None or operation.sequence in found:
            continue
        found[operation.sequence] = operation
        for reference in operation.references:
            value = reference.value
            if isinstance(value, Product) and value.content is None:
                waiting.append(value.producer)
    return deque(found[sequence] for sequence in sorted(found))


def rerun(operation: Operation) -> None:
    """Run one operation on recomputed arguments and fill the products that are still wanted."""
    private = [private_base(reference) for reference in operation.written]
    replaced = {id(reference): base for reference, base in zip(operation.written, private, strict=True)}

    def tensor(reference: Reference) -> torch.Tensor:
        base = replaced.get(id(reference))
        return reference.tensor() if base is None else reference.geometry.over(base)

    args, kwargs = tree_map_only(Reference, tensor, (operation.args, operation.kwargs))
    if operation.generator_state is None:
        results = operation.operator(*args, **kwargs)
    else:
        with operation.generator_state.repeated():
            results = operation.operator(*args, **kwargs)
    flat = tree_flatten(results)[0]
    for position, product in operation.outputs:
        give(product(), flat[position])
    for index, product in operation.becomes:
        give(product(), private[index])


def private_base(reference: Reference) -> torch.Tensor:
    """The content of an argument that is written into, in memory that nobody else reads."""
    base = reference.value.base()
    # Held by the reference and by getrefcount's own argument: nobody but this operation knows the product.
    if isinstance(reference.value, Product) and sys.getrefcount(reference.value) <= 2:
        return base
    return copy_of_storage(base)


def give(product: Product | None, content: torch.Tensor) -> None:
    if product is not None:
        product.fill(content)
