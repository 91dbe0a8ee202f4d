"""Steps that all ranks of FSDP2 compute together: each forward and backward exchanges weights and gradients.

So every rank runs as many micro-batches as the others, and none is cut in the middle: a signal ends the training after
the step that runs, and out of memory before the gradients are complete ends all. The update exchanges nothing, so a
rank that runs out of memory there finishes it by itself. FSDP2 means gradients over ranks, and a loss is a sum over
tokens. So each rank divides its own by the tokens of the whole batch over the number of ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tightfit.data.samples import Samples
from tightfit.errors import CannotFit
from tightfit.levers.chunked_loss import chunks_without_gradients
from tightfit.levers.micro_batch import as_parts, batch_size, split_batch
from tightfit.models.mode import evaluating
from tightfit.processes.ranks import Ranks
from tightfit.ranks.shards import free_gathered, whole
from tightfit.recovery.catching import Failure, caught, insist
from tightfit.recovery.update import UpdateGuard, carry_out
from tightfit.step import forward_backward
from tightfit.training.evaluation import HeldOutSums
from tightfit.training.joining import agree_on_signal
from tightfit.training.objective import VALID_TOKENS, WHOLE_ROWS, Objective, counted
from tightfit.training.stepper import StepOutcome, Stepper, StepUnderWay, without_labels


@dataclass
class ShardedStepper(Stepper):
    """A stepper of one rank of FSDP2. `planned_bytes` is the predicted peak of its step. Mutable: `one_by_one`."""

    planned_bytes: int = field(default=0, kw_only=True)
    recovers: bool = field(default=True, kw_only=True)
    note: Callable[[str], None] = field(default=lambda line: None, kw_only=True)
    one_by_one: bool = field(default=False, init=False)  # the update, since its memory ran out once
    is_sharded = True

    def goes_on(self) -> bool:
        return not agree_on_signal(self.ranks, self.interrupt)

    def count_for(self, batch: Mapping[str, Any]) -> int:
        """The micro-batches of a batch, on every rank: as many as the rank with most samples can have."""
        together = getattr(self.loss, "rows_together", 1)
        return min(self.micro_batches, max(1, self.ranks.largest_share(batch[WHOLE_ROWS] // together)))

    def step(self, batch: Mapping[str, Any]) -> StepOutcome:
        step = _ShardedStep(self, batch)
        step.exchange()
        step.update()
        step.end()
        return step.outcome()

    def attempt(self, batch: Mapping[str, Any], number: int) -> StepOutcome:
        """Raises `CannotFit` where this rank is out of memory before its gradients are complete, `RecoveryError` where
        its update cannot be finished, `RankError` where another rank is lost.
        """
        step = _ShardedStep(self, batch)
        with self.ranks.talking():
            failure = caught(step.exchange, self.device)
            if failure is not None:
                raise CannotFit(
                    f"step {number}: rank {self.ranks.rank} is {failure}; ranks of FSDP2 do not repeat a step: go on "
                    "with --resume and a lower memory.budget",
                    self.planned_bytes,
                )
        if self.recovers:
            self._updated(step, number)
            insist(step.end, self.device)
        else:
            step.update()
            step.end()
        return step.outcome()

    def _updated(self, step: StepUnderWay, number: int) -> None:
        def failed(failure: Failure) -> None:
            if not self.one_by_one:
                self.one_by_one = True
                self.note(
                    f"step {number}: rank {self.ranks.rank} is {failure} in the optimizer's step; it goes on where it "
                    "stopped, one parameter at a time from now on: the same bits with less memory"
                )

        carry_out(UpdateGuard(self.optimizer), step.update, self.device, single=self.one_by_one, failed=failed)

    def undo(self) -> None:
        """Nothing: a step is not cut."""


class _ShardedStep(StepUnderWay):
    def exchange(self) -> None:
        """All that the other ranks take part in: the gradients, and their norm."""
        self.compute_gradients()
        self.join()

    def compute_gradients(self) -> None:
        stepper, batch = self._stepper, self._batch
        divided = {**batch, VALID_TOKENS: batch[VALID_TOKENS] / stepper.ranks.size}
        parts = as_parts(lockstep_parts(divided, stepper.count_for(batch)), stepper.loss)
        self._loss = forward_backward(stepper.model, parts, stepper.loss, stepper.settings.precision)

    def join(self) -> None:
        assert self._loss is not None, "the gradients were computed"
        ranks = self._stepper.ranks
        self._loss = torch.tensor(ranks.total([float(self._loss)])[0] / ranks.size)
        self._clip()
        if self._norm is not None:
            self._norm = whole(self._norm)


def lockstep_parts(batch: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """A rank's samples in exactly so many micro-batches: where there are too few, the first of them are one sample
    each whose labels are ignored.
    """
    own = min(count, batch_size(dict(batch)))
    parts = split_batch(dict(batch), own)
    idle = [without_labels(split_batch(dict(batch), batch_size(dict(batch)))[0])] if own < count else []
    return [*idle * (count - own), *parts]


@torch.no_grad()
def held_out_in_lockstep(
    model: nn.Module,
    samples: Samples,
    loss: Objective,
    *,
    micro_batch_size: int,
    ranks: Ranks,
    stop: Callable[[], bool],
) -> HeldOutSums | None:
    """As `held_out_sums`, with as many forwards on each rank. `stop` gives all ranks the same answer."""
    device = next(model.parameters()).device
    order = np.arange(len(samples)) if samples.is_even else np.argsort(-samples.lengths, kind="stable")
    size = max(micro_batch_size // samples.rows, 1)
    total = tokens = 0.0
    with evaluating(model), chunks_without_gradients(model), ranks.talking():
        try:
            for first in range(0, ranks.largest_share(len(order)), size):
                if stop():
                    return None
                own = order[ranks.rank :: ranks.size][first : first + size]
                batch = counted(samples.batch(own if len(own) else order[:1]), device)
                share = float(loss(model, batch)) * loss.count(batch)
                if len(own):
                    total += share
                    tokens += loss.count(batch)
        finally:
            free_gathered(model)
    return HeldOutSums(total, tokens)
