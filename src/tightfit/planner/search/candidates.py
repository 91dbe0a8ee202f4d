"""The records that a search compares: candidates (traced as applied) and baselines (priced); their levers in words."""

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Chain, least_peak, solve
from tightfit.planner.levers import Combination
from tightfit.tracing.record import Category, StepTrace

# Python numbers that PyTorch wraps in tensors take a few bytes each, and no dispatch mode sees them (at most 4 bytes
# over the models of docs/accuracy.md). A plan leaves this much of the budget free.
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
    worst_bytes: int | None = None  # the peak with all tokens routed to the fewest experts, if the peak depends on it

    @property
    def peak_bytes(self) -> int:
        return self.trace.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """The smallest budget in bytes that this candidate fits."""
        return max(self.trace.peak_bytes, self.worst_bytes or 0) + UNSEEN_BYTES

    @property
    def seconds(self) -> float:
        return self.trace.step_seconds


@dataclass(frozen=True)
class Baseline:
    """A combination with nothing recomputed, and the prices of its blocks (None if the model has none)."""

    combination: Combination
    peak_bytes: int
    seconds: float  # of a step: a lower bound for every choice inside blocks
    priced: Priced | None

    @property
    def chain(self) -> Chain:
        assert self.priced is not None, "there are blocks"
        return self.priced.chain

    @property
    def least_bytes(self) -> int:
        """The least peak of the choices inside blocks, as priced."""
        return self.peak_bytes if self.priced is None else least_peak(self.priced.chain).peak_bytes

    @property
    def least_choice(self) -> tuple[int, ...]:
        """The choice inside blocks of the least peak."""
        return () if self.priced is None else least_peak(self.priced.chain).choice

    def choice_within(self, bound: int) -> tuple[int, ...] | None:
        """The fastest choice inside blocks whose peak, as priced, is within a bound; None if none is."""
        if self.priced is None:
            return () if self.peak_bytes <= bound else None
        found = solve(self.priced.chain, bound)
        return None if found is None else found.choice

    def policies(self, choice: tuple[int, ...]) -> dict[str, Policy]:
        """The policies of the blocks in a choice."""
        return {} if self.priced is None else self.priced.policies(choice)


def describe_levers(combination: Combination, policies: Mapping[str, Policy], blocks: int, joined: int = 0) -> str:
    """The levers of a candidate in a few words: how many of `blocks` recompute, offload, or are joined to the next."""
    words = [str(combination)] if combination.levers else []
    blocks = max(blocks, len(policies))  # those of other outcomes too
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
    """Seconds in which one micro-batch adds to existing gradients. The first of several has none to add to."""
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
