"""The lever `chunked_loss`: head and cross-entropy run together, on the logits of some tokens at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tightfit.planner.levers.base import Exactness, Lever, PlainStep, register

if TYPE_CHECKING:
    from torch import nn

    from tightfit.levers.handle import Applied
    from tightfit.planner.records import BlockChoice


@register
@dataclass(frozen=True)
class ChunkedLoss(Lever):
    """`head` is the path of the linear layer that computes the logits. `chunk_size` is the number of tokens in a chunk;
    None: the operator chooses.
    """

    head: str
    chunk_size: int | None = None

    name = "chunked_loss"
    title = "chunked loss"
    summary = "head and cross-entropy run on chunks of tokens and never materialise all logits"
    exactness = Exactness.ROUNDING

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        from tightfit.planner.levers.head import find_head

        head = find_head(step.trace, step.model)
        return [] if head is None else [cls(head)]

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        return None if cls.settings(step) else "no linear head that feeds a cross-entropy was found"

    def apply(self, model: "nn.Module") -> "Applied":
        from tightfit.levers.chunked_loss import apply_chunked_loss

        return apply_chunked_loss(model, self.head, self.chunk_size)

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        return f"The loss and its head ({self.head}) run in chunks; the logits are never whole."

    def __str__(self) -> str:
        return "chunked loss"
