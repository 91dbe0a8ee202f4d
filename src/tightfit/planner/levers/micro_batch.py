"""The lever `micro_batch`: gradient accumulation over parts of the batch, weighted by valid tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from tightfit.names import LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES
from tightfit.planner.levers.base import Exactness, Lever, PlainStep, Separation, Suggestion, register

if TYPE_CHECKING:
    from tightfit.planner.records import BlockChoice

# Gradients of weights that are summed in parts (micro-batches, tiles) differ more than by the order of one product's
# sums: by -4% to +29% as measured (notes/exactness.md, "Rounding"). A wrong weight of a part would change them
# thousands of times more.
PARTS_SPREAD = 1.5


@register
@dataclass(frozen=True)
class MicroBatches(Lever):
    """`count` equal parts of the batch. `AppliedPlan.backward` runs them. No module changes.

    `tried`: that the samples of the batch can be computed apart was seen on real numbers, or is the caller's own
    decision. Otherwise the first backward tries it.
    """

    count: int
    tried: bool = field(default=False, compare=False)

    name = "micro_batch"
    title = "micro batch"
    summary = "the batch runs in several passes, each weighted by its valid tokens"
    exactness = Exactness.ROUNDING
    spread = PARTS_SPREAD
    excludes = (LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES,)

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        return cls.apart(step.separation(), step.micro_batches, step.size)

    @classmethod
    def apart(cls, separation: Separation, micro_batches: int, size: int) -> list[Self]:
        """The settings of `beyond` for a batch of that separation: none if its samples cannot be computed apart."""
        if separation.refusal is not None:
            return []
        return [replace(each, tried=separation.tried) for each in cls.beyond(micro_batches, size)]

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        return step.separation().refusal

    @classmethod
    def beyond(cls, micro_batches: int, size: int) -> list[Self]:
        """Settings with more than `micro_batches` equal parts of `size` sequences, the fewest first."""
        return [cls(n) for n in range(micro_batches + 1, size + 1) if size % n == 0]

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        return f"The batch runs in {self.count} micro-batches, weighted by their valid tokens."

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """The two smallest numbers of micro-batches."""
        line = f'tightfit.plan(model, batch, "BUDGET", levers=["{cls.name}"]).apply(model).backward(batch)'
        return [
            Suggestion(str(each), line, f"training: {{gradient_accumulation_steps: {each.count}}}", lever=each)
            for each in cls.settings(step)[:2]
        ]

    def __str__(self) -> str:
        return f"{self.count} micro-batches"
