"""Finds the modules inside blocks that treat each token by itself, such as a feed-forward, from what the step did."""

from collections.abc import Sequence

from torch import nn

from tightfit.devices.families import Family, base_name, family_of
from tightfit.runtime.nested import tensors_in
from tightfit.step import Batch
from tightfit.tracing.record import Category, OperatorRecord, Phase, StepTrace

_ELEMENTWISE = (Family.FREE, Family.ARITHMETIC, Family.TRANSCENDENTAL, Family.ERROR_FUNCTION)
_PRODUCTS = ("mm", "addmm")  # of rows, one for each token; batched ones may be those of tokens with each other
_CASTS = ("_to_copy", "clone")


def find_tokenwise(trace: StepTrace, model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Paths of the outermost modules within the blocks whose operators are products with weights, at least two of
    them, and element by element, of weights with one dimension at most: others may be there for each position. The
    lever itself tries a module out on a few tokens before it is used.
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
    """The largest second dimension of the batch's tensors: tokens of a sequence; 1 where there is none."""
    return max((tensor.shape[1] for tensor in tensors_in(batch) if tensor.dim() > 1), default=1)


def _with_parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _is_elementwise(trace: StepTrace, operator: OperatorRecord) -> bool:
    """Whether the operator casts, or computes each element from what is in its place and weights of one dimension."""
    if base_name(operator.name) in _CASTS:
        return True
    read = (trace.storages[trace.values[value].storage] for value in operator.reads)
    flat = all(storage.category is not Category.PARAMETER or len(storage.shape) <= 1 for storage in read)
    return flat and family_of(operator.name) in _ELEMENTWISE
