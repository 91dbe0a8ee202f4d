"""Computes products again, as few operators as the asked-for value needs, in their original order."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from tightfit.levers.recompute.values import Fetch, Operation, Product, Reference, whole_storage
from tightfit.runtime.activity import recomputation
from tightfit.runtime.internals import NoAutocast


def materialise(product: Product) -> None:
    """Make `product` ready.

    Recomputed values that autograd still waits for stay filled until it lets go of them; others go as soon as the
    last operator that reads them has run.
    """
    if product.is_ready:
        return
    pending = needed_operations(product)
    with torch.no_grad(), NoAutocast(), recomputation():
        while pending:
            rerun(pending.popleft())


def needed_operations(product: Product) -> deque[Operation | Fetch]:
    """The operations to run, and the fetches to bring back, oldest first."""
    found: dict[int, Operation | Fetch] = {}
    waiting = [product.producer]
    while waiting:
        operation = waiting.pop()
        if operation is None or operation.sequence in found:
            continue
        found[operation.sequence] = operation
        for reference in operation.references:
            value = reference.value
            if isinstance(value, Product) and not value.is_ready:
                waiting.append(value.producer)
    return deque(found[sequence] for sequence in sorted(found))


def rerun(operation: Operation | Fetch) -> None:
    """Run one operation on recomputed arguments and fill the products that are still wanted."""
    if isinstance(operation, Fetch):
        operation.deliver()
        return
    private = [private_base(reference) for reference in operation.written]
    replaced = {id(reference): base for reference, base in zip(operation.written, private, strict=True)}
    random = operation.generator_state
    with nullcontext() if random is None else random.repeated(), default_dtype(operation.default_dtype):
        results = operation.call(replaced)
    for position, product in operation.outputs:
        give(product(), results[position])
    for index, product in operation.becomes:
        give(product(), private[index])


def private_base(reference: Reference) -> torch.Tensor:
    """The content of an argument that is written into, in memory that nobody else reads."""
    value = reference.value
    # Held by the reference, by `value` and by getrefcount's own argument: nobody but this operation knows the product.
    if isinstance(value, Product) and value.content is not None and not value.lent and sys.getrefcount(value) <= 3:
        return value.content
    return whole_storage(value.base()).clone()


def give(product: Product | None, content: torch.Tensor) -> None:
    if product is not None:
        product.fill(content)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Constants made inside without a dtype get this one."""
    present = torch.get_default_dtype()
    if present == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(present)
