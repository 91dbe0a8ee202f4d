"""What a search compares: candidates, traced as applied; baselines, priced; and their levers in words."""

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Chain
from tightfit.planner.levers import Combination
from tightfit.tracing.record import Category, StepTrace

# Numbers that Python wraps in a tensor, and the like, take a few bytes each that no dispatch mode sees (at most 4 were
# seen over the models of docs/accuracy.md): so much is left free below the budget.
UNSEEN_BYTES = 1024


@dataclass(frozen=True)
class Candidate:
    """Levers that were traced as applied."""

    combination: Combination
    policies: dict[str, Policy]
    joined: tuple[str, ...]
    trace: StepTrace
    priced: Priced | None = None
    choice: tuple[int, ...] = ()
    worst_bytes: int | None = None  # the peak with all tokens at the fewest experts, if that makes a difference

    @property
    def peak_bytes(self) -> int:
        return self.trace.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """The smallest budget that this candidate may be given."""
        return max(self.trace.peak_bytes, self.worst_bytes or 0) + UNSEEN_BYTES

    @property
    def seconds(self) -> float:
        return self.trace.step_seconds


@dataclass(frozen=True)
class Baseline:
    """A combination as it stands with nothing recomputed, and its blocks with their prices; None without blocks."""

    combination: Combination
    peak_bytes: int
    seconds: float  # of a step; no choice inside blocks is faster
    priced: Priced | None

    @property
    def chain(self) -> Chain:
        assert self.priced is not None, "there are blocks"
        return self.priced.chain


def describe_levers(combination: Combination, policies: Mapping[str, Policy], blocks: int, joined: int = 0) -> str:
    """The levers of a candidate in a few words: how many of `blocks` recompute or offload; `joined` hold no output."""
    words = [str(combination)] if combination.levers else []
    offloading = sum(policy.offloads for policy in policies.values())
    recomputing = sum(policy != KEEP_ALL for policy in policies.values()) - offloading
    if offloading:
        words.append(f"{offloading} of {blocks} blocks offload")
    if recomputing:
        words.append(f"{recomputing} of {blocks} blocks recompute")
    if joined:
        words.append(f"{joined} of them joined to the next")
    return ", ".join(words) or "no lever"


def accumulation_seconds(part: StepTrace) -> float:
    """Seconds of adding to gradients that were there, which the first of several micro-batches has no need to do."""
    if part.loop_repeats == 1:
        return 0.0
    gradients = {i for i, storage in enumerate(part.storages) if storage.category is Category.GRADIENT}
    return sum(
        operator.seconds
        for operator in part.operators
        if operator.name == "aten.add_.Tensor" and any(part.values[v].storage in gradients for v in operator.makes)
    )


def loop_seconds(trace: StepTrace) -> float:
    """Seconds of all micro-batches, without the optimizer."""
    first, last = trace.repeated
    before = sum(operator.seconds for operator in trace.operators[:first])
    return before + trace.loop_repeats * sum(operator.seconds for operator in trace.operators[first:last])
