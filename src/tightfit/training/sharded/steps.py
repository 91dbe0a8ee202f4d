"""Steps that all ranks of FSDP2 compute together: each forward and backward exchanges weights and gradients.

So every rank runs as many micro-batches as the others, and none is cut in the middle: a signal ends the training after
the step that runs. A rank that is out of memory before its gradients are complete sends what the others wait for
(`sharded.standing_in`) and says so with its loss. Then all undo the step, get a tighter plan from rank 0, and run it
again. The update exchanges nothing, so a rank that runs out of memory there finishes it by itself.

FSDP2 means gradients over ranks, and a loss is a sum over tokens. So each rank divides its own by the tokens of the
whole batch over the number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tightfit.errors import CannotFit, TightfitError
from tightfit.levers.chunked_loss import chunks_without_gradients
from tightfit.levers.micro_batch import as_parts, batch_size, split_batch
from tightfit.models.mode import evaluating
from tightfit.ranks.processes.ranks import Ranks
from tightfit.ranks.sent_messages import SentMessages
from tightfit.ranks.shards import free_gathered, whole
from tightfit.runtime.internals import states_of_fsdp2
from tightfit.step import forward_backward
from tightfit.training.corrections import Corrections
from tightfit.training.data.samples import Samples
from tightfit.training.evaluation import HeldOutSums
from tightfit.training.joining import agree_on_signal
from tightfit.training.objective import VALID_TOKENS, WHOLE_ROWS, Objective, counted
from tightfit.training.recovery.catching import TRIES, Failure, caught, insist
from tightfit.training.recovery.step_state import StepState
from tightfit.training.recovery.tightening import run_until_it_fits
from tightfit.training.recovery.update import FINISHED, UpdateGuard, carry_out
from tightfit.training.sharded.tightening import TighterPlans, failures_of_all
from tightfit.training.stepper import StepOutcome, Stepper, StepUnderWay, without_labels

TOKENS = 16  # of each row: enough for any kernel, and next to no memory beside the weights


class Stranded(CannotFit):
    """This rank is out of memory in the middle of what the others wait for, and cannot go on: no step can be undone on
    all ranks, and nothing be written together.
    """


@dataclass
class ShardedStepper(Stepper):
    """A stepper of one rank of FSDP2. `planned_bytes` is the predicted peak of the step that it begins with.

    With `recovers`, an update that runs out of memory is finished; with `plans`, a step is undone and run again under a
    tighter one. Mutable: what it has learnt (`corrections`).
    """

    planned_bytes: int = field(default=0, kw_only=True)
    recovers: bool = field(default=True, kw_only=True)
    plans: TighterPlans | None = field(default=None, kw_only=True)
    note: Callable[[str], None] = field(default=lambda line: None, kw_only=True)
    corrections: Corrections = field(default_factory=Corrections, kw_only=True)
    is_sharded = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._state = StepState(self.model, apart=states_of_fsdp2(self.model.modules()))
        self._messages = SentMessages(self.model)

    def goes_on(self) -> bool:
        return not agree_on_signal(self.ranks, self.interrupt)

    def count_for(self, batch: Mapping[str, Any]) -> int:
        """The micro-batches of a batch, on every rank: as many as the rank with most samples can have."""
        return min(self.micro_batches, max(1, self.ranks.largest_share(batch[WHOLE_ROWS] // self._together)))

    @property
    def _together(self) -> int:
        return getattr(self.loss, "rows_together", 1)

    def step(self, batch: Mapping[str, Any]) -> StepOutcome:
        step = _ShardedStep(self, batch)
        step.compute_gradients()
        step.losses_joined(None)
        step.clip()
        step.update()
        step.end()
        return step.outcome()

    def attempt(self, batch: Mapping[str, Any], number: int) -> StepOutcome:
        """Step `number`, whatever it takes.

        Raises `CannotFit` on rank 0, `OtherCannotFit` on the others, where no tighter plan is left: the step is undone.
        `Stranded` where this rank cannot go on in the middle of a step, `RecoveryError` where the step cannot be undone
        or finished, `RankError` where another rank is lost.
        """
        step = self._with_gradients(batch, number)
        if self.recovers:
            self._updated(step, number)
            insist(step.end, self.device)
        else:
            step.update()
            step.end()
        return step.outcome()

    # A step that fails before its gradients are complete

    def _with_gradients(self, batch: Mapping[str, Any], number: int) -> "_ShardedStep":
        steps: list[_ShardedStep] = []

        def attempt() -> tuple[Failure | None] | None:
            """Where a rank has failed: this rank's own failure, if it has one."""
            step = _ShardedStep(self, batch)
            if self.plans is not None:
                insist(self._state.remember, self.device)
            with self.ranks.talking():
                failure = self._exchanged(step, batch, number)
                if not step.losses_joined(failure):
                    return (failure,)
                self._clipped(step, number)
            steps.append(step)
            return None

        run_until_it_fits(attempt, self.undo, partial(self._tighten, number), self.device)
        if self.plans is not None:
            insist(self._state.settle, self.device)
        return steps[0]

    def _exchanged(self, step: "_ShardedStep", batch: Mapping[str, Any], number: int) -> Failure | None:
        """All messages of forward and backward. Where this rank ran out of memory in them, with what was said of it."""
        self._messages.begin(self.count_for(batch))
        failure = caught(step.compute_gradients, self.device)
        if failure is not None:
            self._stand_in(batch, number, failure)
        self._messages.end()
        return failure

    def _stand_in(self, batch: Mapping[str, Any], number: int, failure: Failure) -> None:
        if self.plans is None:
            raise self._stranded(number, failure, "memory.recover is false")
        for _ in range(TRIES):
            if self._messages.is_torn:
                raise self._stranded(number, failure, "a message to the other ranks failed with it")
            try:
                if caught(lambda: self._send_the_rest(batch), self.device) is None:
                    return
            except Exception as error:
                if isinstance(error, TightfitError) or self._messages.is_torn:
                    raise
                why = f"the model does not run a sample of few tokens ({type(error).__name__}: {error})"
                raise self._stranded(number, failure, why) from error
        raise self._stranded(number, failure, "there is no room for the messages that the other ranks wait for")

    def _send_the_rest(self, batch: Mapping[str, Any]) -> None:
        self._messages.begin_again()
        self.undo()  # what levers and modules hold of the attempt before
        parts = as_parts(small_parts(batch, self.count_for(batch), self._together), self.loss)
        forward_backward(self.model, parts, self.loss, self.settings.precision)

    def _clipped(self, step: "_ShardedStep", number: int) -> None:
        failure = caught(step.clip, self.device)
        if failure is not None:
            raise self._stranded(number, failure, "it clips gradients together with the other ranks")

    def _stranded(self, number: int, failure: Failure, why: str) -> Stranded:
        planned = self.planned_bytes if self.plans is None else self.plans.levers.fitted.planned.peak_bytes
        return Stranded(
            f"step {number}: rank {self.ranks.rank} is {failure}, and the step is not repeated: {why}: go on with "
            "--resume and a lower memory.budget",
            planned,
        )

    def _tighten(self, number: int, own: tuple[Failure | None], tried: Sequence[int]) -> int:
        """Put the next tighter plan in force on all ranks. Returns the peak of the one before, and raises as `attempt`
        does where there is none.
        """
        plans = self.plans
        assert plans is not None, "without tighter plans, a rank that fails is stranded"
        before = plans.levers.fitted.planned.peak_bytes
        failures = failures_of_all(self.ranks, own[0])
        fitted = plans.next(failures, number, [*tried, before])
        plans.put_in_force(fitted)
        self._messages.forget()
        self.micro_batches = fitted.micro_batches
        learnt = {"plan": fitted.plan, "bound_bytes": fitted.planned.peak_bytes}
        self.corrections = replace(self.corrections, **learnt, failures=self.corrections.failures + 1)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # the peak is the new plan's
        if self.ranks.is_first:  # for all
            self.note(plans.words(failures, number, before))
        self._state.put_back_random()
        return before

    # A step that fails in its update

    def _updated(self, step: StepUnderWay, number: int) -> None:
        def failed(failure: Failure) -> None:
            if not self.corrections.one_by_one:
                self.corrections = replace(self.corrections, one_by_one=True)
                self.note(f"step {number}: {failure}{FINISHED}")

        single = self.corrections.one_by_one
        carry_out(UpdateGuard(self.optimizer), step.update, self.device, single=single, failed=failed)


class _ShardedStep(StepUnderWay):
    def compute_gradients(self) -> None:
        stepper, batch = self._stepper, self._batch
        divided = {**batch, VALID_TOKENS: batch[VALID_TOKENS] / stepper.ranks.size}
        parts = as_parts(lockstep_parts(divided, stepper.count_for(batch)), stepper.loss)
        self._loss = forward_backward(stepper.model, parts, stepper.loss, stepper.settings.precision)

    def losses_joined(self, failure: Failure | None) -> bool:
        """The mean of all ranks' losses becomes the step's. False where a rank has failed: then the step is void."""
        ranks = self._stepper.ranks
        own = 0.0 if self._loss is None else float(self._loss)
        total, failed = ranks.total([own, float(failure is not None)])
        self._loss = torch.tensor(total / ranks.size)
        return not failed

    def clip(self) -> None:
        """All ranks have their gradients."""
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


def small_parts(batch: Mapping[str, Any], count: int, together: int) -> list[Mapping[str, Any]]:
    """`count` micro-batches of one sample each (`together` rows), cut to few tokens, with nothing to learn.

    The other ranks wait inside PyTorch for the messages of a rank that ran out of memory. So it lets go of all that the
    step holds, and runs forward and backward of these in its place. What the step has sent is not sent again
    (`ranks.sent_messages`). Whatever the others make of it is thrown away: they hear of it with their gradients.
    """
    sample = split_batch(dict(batch), batch_size(dict(batch)) // together)[0]
    length = sample["input_ids"].shape[1]
    cut = {name: value[:, :TOKENS] if _is_of_tokens(value, length) else value for name, value in sample.items()}
    return [without_labels(cut)] * count


def _is_of_tokens(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
