"""Finds modules inside blocks that treat each token by itself, such as a feed-forward, from the traced operators."""

from collections.abc import Sequence

from torch import nn

from tightfit.devices.families import Family, base_name, family_of
from tightfit.runtime.nested import tensors_in
from tightfit.step import Batch
from tightfit.tracing.record import Category, OperatorRecord, Phase, StepTrace

_ELEMENTWISE = (Family.FREE, Family.ARITHMETIC, Family.TRANSCENDENTAL, Family.ERROR_FUNCTION)
_PRODUCTS = ("mm", "addmm")  # rows are tokens here; a batched product may multiply tokens with each other (attention)
_CASTS = ("_to_copy", "clone")


def find_tokenwise(trace: StepTrace, model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Paths of the outermost modules inside blocks that treat each token by itself.

    Their operators are at least two products with weights, and elementwise operators on weights of at most one
    dimension. This is a guess: the lever itself runs a module on a few tokens before it uses it.
    """
    first, last = trace.repeated
    tokenwise: dict[str, bool] = {}
    products: dict[str, int] = {}
    for operator in trace.operators[first:last]:
        if operator.phase is not Phase.FORWARD:
            continue
        is_product = base_name(operator.name) in _PRODUCTS
        for path in _with_parents(operator.module):
            tokenwise[path] = tokenwise.get(path, True) and (is_product or _is_elementwise(trace, operator))
            products[path] = products.get(path, 0) + is_product
    found: list[str] = []
    for path, _ in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in blocks)
        if not inside or any(path.startswith(f"{other}.") for other in found):
            continue
        if products.get(path, 0) >= 2 and tokenwise[path]:
            found.append(path)
    return found


def longest_sequence(batch: Batch) -> int:
    """The largest second dimension of the batch's tensors, the tokens of a sequence; 1 if there is none."""
    return max((tensor.shape[1] for tensor in tensors_in(batch) if tensor.dim() > 1), default=1)


def _with_parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _is_elementwise(trace: StepTrace, operator: OperatorRecord) -> bool:
    """True if the operator casts, or computes each element from the same place of its inputs and from flat weights."""
    if base_name(operator.name) in _CASTS:
        return True
    read = (trace.storages[trace.values[value].storage] for value in operator.reads)
    # A weight of two dimensions may have a row for each position, which a tile would read at the wrong offset.
    flat = all(storage.category is not Category.PARAMETER or len(storage.shape) <= 1 for storage in read)
    return flat and family_of(operator.name) in _ELEMENTWISE
