"""The inputs of a language model's head: the hidden states of all tokens, and the weight that would make the logits.

A loss over chunks of tokens needs these two, and never the logits. The head's own product is left out while the model
runs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.models.mode import evaluating
from tightfit.tracing.restore import generators_restored

PROBE_TOKENS = 8


class HeadInput(NamedTuple):
    """`hidden` (B, T, D), `weight` (V, D) and `bias` (V,) of the head. `auxiliary` is what a mixture of experts adds to
    the mean loss in training, a scalar; None where it adds nothing.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    auxiliary: Tensor | None


def head_of(model: nn.Module) -> nn.Linear:
    """The linear layer that makes a model's logits. Raises `ModelError` where it has none, or another kind."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else getattr(model, "head", None)
    if type(head) is not nn.Linear:
        kind = "no output layer" if head is None else f"a {type(head).__name__} as output layer"
        raise ModelError(f"{type(model).__name__} has {kind}: distillation needs an nn.Linear that makes the logits")
    return head


def head_input(model: nn.Module, inputs: Mapping[str, Any]) -> HeadInput:
    """Run a model without its head. `inputs` are its keyword arguments."""
    head, given = head_of(model), []
    with _without_product(head, given):
        output = model(**inputs)
    assert len(given) == 1, "a model calls its head once"
    return HeadInput(given[0], head.weight, head.bias, getattr(output, "auxiliary_loss", None))


@contextmanager
def _without_product(head: nn.Linear, given: list[Tensor]) -> Iterator[None]:
    """A context in which a head notes its input and returns no logits."""

    def forward(hidden: Tensor) -> Tensor:
        given.append(hidden)
        return hidden[..., :1]  # a view: what the model does to its logits costs nothing

    # On the instance, where levers put their forwards: hooks of the head still run.
    before = head.__dict__.get("forward")
    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del head.__dict__["forward"]
        else:
            head.__dict__["forward"] = before


@torch.no_grad()
def demand_plain_logits(model: nn.Module, whose: str) -> None:
    """Raise `ModelError` unless the logits are the head's product, bit for bit: soft caps and scales are not."""
    head = head_of(model)
    ids = torch.arange(PROBE_TOKENS, device=head.weight.device)[None] % len(head.weight)
    with evaluating(model), generators_restored():
        logits = model(input_ids=ids).logits
        found = head_input(model, {"input_ids": ids})
        product = F.linear(found.hidden, found.weight, found.bias)
    if not torch.equal(logits.to(product.dtype), product):
        raise ModelError(
            f"{whose} {type(model).__name__} changes its logits after its head (a soft cap, or a scale), which a loss "
            "over chunks of the head would miss: choose another model"
        )
