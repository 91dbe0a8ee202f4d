"""Replays recorded operators: only those that the requested value needs, in their original order."""

import sys
from collections import deque
from contextlib import nullcontext
from typing import Any, cast

import torch

from tightfit.levers.activity import recomputation
from tightfit.levers.recompute.values import Fetch, Operation, Product, Reference, Root, whole_storage
from tightfit.runtime.internals import NoAutocast, function_switches, switched_as


def materialise(product: Product) -> None:
    """Compute `product` again, so that it is ready.

    Recomputed values that autograd has saved are held until autograd frees them. Others are freed as soon as the last
    operator that reads them has run.
    """
    if product.is_ready:
        return
    if isinstance(product.producer, Fetch):
        with recomputation():
            product.producer.deliver()
        return
    pending, present = needed_operations(product), function_switches(convolves=False, calls=False)
    # The recorded operators are below autograd and autocast, so neither may act on them again.
    with torch.no_grad(), NoAutocast(), recomputation():
        while pending:
            rerun(pending.popleft(), present)  # popped: this queue holds no arguments that nothing else needs


def needed_operations(product: Product) -> deque[Operation | Fetch]:
    """The operations to run and the copies to fetch, in the order in which they were recorded."""
    found: dict[int, Operation | Fetch] = {}
    waiting = [product.producer]
    while waiting:
        operation = waiting.pop()
        if operation is None or operation.sequence in found:
            continue
        found[operation.sequence] = operation
        for value in operation.values():
            if isinstance(value, Product) and not value.is_ready:
                waiting.append(value.producer)
    return deque(found[sequence] for sequence in sorted(found))


def rerun(operation: Operation | Fetch, present: tuple) -> None:
    """Run one operation on recomputed arguments, and fill those of its products that are still referenced.

    `present` are the process's settings.
    """
    if isinstance(operation, Fetch):
        operation.deliver()
        return
    private, replaced = [], {}
    if operation.written:
        private = [private_base(reference) for reference in operation.written]
        # An argument that is read and is also where the results go (`torch.div(z, w, out=z)`) is one tensor again:
        # kernels round complex numbers otherwise where it is two.
        replaced = {
            id(reference): base
            for written, base in zip(operation.written, private, strict=True)
            for reference in operation.references
            if reference.value is written.value
        }
    random = operation.generator_state
    if random is None and operation.switches == present:  # two contexts fewer
        results = operation.call(replaced)
    else:
        with nullcontext() if random is None else random.repeated(), switched_as(operation.switches):
            results = operation.call(replaced)
    # Products that nothing references any more are not filled, so their memory is freed at once.
    for position, product in operation.outputs:
        give(product(), results[position])
    for index, product in operation.becomes:
        give(product(), private[index])


def private_base(reference: Reference) -> torch.Tensor:
    """The content of an argument that the operation writes into, in memory that nothing else reads."""
    # Where only this operation knows the product, it may write into the memory without a copy.
    if is_recomputed(reference.value) and references_to_value(reference) <= ALONE:
        return reference.value.base()
    return whole_storage(reference.value.base()).clone()


def is_recomputed(value: Root | Product) -> bool:
    """True for a value in memory that the executor alone knows."""
    return isinstance(value, Product) and value.content is not None and not value.lent


def references_to_value(reference: Reference) -> int:
    """The references to the value of a `Reference`: its own, others, and those that counting takes."""
    return sys.getrefcount(reference.value)


# Of a value that nothing else knows. Counted, and not known: Python 3.14 passes local variables on without a reference
# of their own, and code that ran often may count otherwise than before. Too low a number costs a copy, too high a one
# writes into memory that others read.
ALONE = min(references_to_value(Reference(cast(Any, object()), cast(Any, None))) for _ in range(256))


def give(product: Product | None, content: torch.Tensor) -> None:
    if product is not None:
        product.fill(content)
