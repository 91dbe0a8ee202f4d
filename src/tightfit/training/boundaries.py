"""A test of whether a model keeps the documents of a packed row apart: run before a training, on a row of two short
documents.

Many models take `position_ids` and let documents see each other all the same: those that build their mask from an
attention mask (transformers#46634), keep a cache of keys and values, or carry a state along the row. Their loss falls
as ever, so nothing else would show it.
"""

import inspect

import torch
from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.models.mode import evaluating
from tightfit.tracing.restore import generators_restored

DOCUMENT_TOKENS = 8
# Of what a document moves that is seen: experts compute the tokens of all documents in one product, whose rounding
# depends on how many there are.
ROUNDING = {torch.float32: 1e-2, torch.float64: 1e-2}
ROUNDING_OF_HALVES = 0.1


@torch.no_grad()
def demand_boundaries(model: nn.Module, *, vocabulary: int, longest: int) -> None:
    """Raises `ModelError` unless a document's logits are the same beside another document, bit for bit, or within
    rounding where the model computes all documents together.

    `vocabulary` is the number of token ids, `longest` the longest row that the model will get. Model and random state
    are left as they were.
    """
    named = type(model).__name__
    if not _takes_positions(model):
        raise ModelError(f"data.packing best_fit: {named} takes no position_ids, so it {_CANNOT}")
    length = max(1, min(DOCUMENT_TOKENS, longest // 2))
    restarting = torch.arange(length).repeat(2)
    with evaluating(model), generators_restored():
        moved, dtype = _moved(model, restarting, vocabulary)
        if moved == 0:
            return
        seen, _ = _moved(model, torch.arange(2 * length), vocabulary)
    if not moved <= ROUNDING.get(dtype, ROUNDING_OF_HALVES) * seen:
        raise ModelError(
            f"data.packing best_fit: in {named} a document's logits move by up to {moved:.2g} when the document before "
            f"it in its row is another one, so it {_CANNOT}"
        )


_CANNOT = "cannot keep the documents of a packed row apart: set data.packing to none"


def _takes_positions(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _moved(model: nn.Module, positions: Tensor, vocabulary: int) -> tuple[float, torch.dtype]:
    """How far the logits of the second half of a row move with the tokens of the first, and their dtype."""
    device = next(model.parameters()).device
    half = len(positions) // 2
    ids = torch.arange(len(positions), device=device) * 7919 % vocabulary
    other = ids.clone()
    other[:half] = (ids[:half] + max(1, vocabulary // 2)) % vocabulary
    first, second = (
        model(input_ids=row[None], position_ids=positions[None].to(device)).logits[0, half:] for row in (ids, other)
    )
    return float((first - second).abs().max()), first.dtype
