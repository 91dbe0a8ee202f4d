"""A tighter plan for all ranks of FSDP2, where some of them were out of memory in a step that all have undone."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import nn

from tightfit.memory.failure import OutOfMemory
from tightfit.ranks.processes.ranks import Ranks
from tightfit.ranks.wrapping import change_sharding
from tightfit.training.config.schema import Config
from tightfit.training.fitting import Fit, LeversInForce
from tightfit.training.joining import OtherCannotFit
from tightfit.training.recovery.catching import Failure
from tightfit.training.recovery.tightening import next_bound, no_tighter_plan, tighter
from tightfit.training.several import fit_as_json, fit_from_json, plan_digest
from tightfit.units import format_bytes

_TODO = "lower training.batch_size or data.sequence_length, add ranks, or allow more levers in memory.levers"


def failures_of_all(ranks: Ranks, own: Failure | None) -> dict[int, Failure]:
    """The ranks that are out of memory, and what was said of it, on every rank."""
    said = ranks.gathered(b"" if own is None else json.dumps(asdict(own)).encode())
    return {rank: _failure_from(content) for rank, content in enumerate(said) if content}


def _failure_from(content: bytes) -> Failure:
    raw = json.loads(content)
    return Failure(raw["line"], None if raw["memory"] is None else OutOfMemory(**raw["memory"]))


def in_words(failures: Mapping[int, Failure]) -> str:
    """Which ranks failed, and how."""
    return "; ".join(f"rank {rank} is {failure}" for rank, failure in failures.items())


@dataclass
class TighterPlans:
    """Plans of a training under FSDP2 within a bound, made on rank 0 for all, and put in force.

    `make` returns the fastest plan of a rank within so many bytes, and raises `CannotFit`; rank 0 alone calls it.
    """

    model: nn.Module
    levers: LeversInForce
    config: Config
    ranks: Ranks
    make: Callable[[int], Fit]

    def next(self, failures: Mapping[int, Failure], number: int, peaks: Sequence[int]) -> Fit:
        """The plan for step `number` after these failures of it, under plans of these peaks, the last one in force.

        Raises `CannotFit` on rank 0, `OtherCannotFit` on the others, where there is none that is tighter.
        """
        bound = min(next_bound(failure, peaks[-1], len(peaks)) for failure in failures.values())
        content = self.ranks.found_by_first(lambda: self._planned(bound, peaks[-1]))
        if not content:
            if not self.ranks.is_first:
                raise OtherCannotFit("ranks are out of memory, and no plan is tighter", 3)
            rank, failure = next(iter(failures.items()))
            raise no_tighter_plan(failure, f"step {number}: rank {rank}", peaks, _TODO)
        fitted, _ = fit_from_json(content, self.config)
        # Its own name for each: what the ranks have said under one stays.
        self.ranks.demand_same({f"plan {len(peaks)} after out of memory in step {number}": plan_digest(fitted)})
        return self._with_budget(fitted)

    def put_in_force(self, fitted: Fit) -> None:
        """Its levers are on the model instead of those before."""
        self.levers.replace(fitted)
        change_sharding(self.model, fitted.sharding)

    def words(self, failures: Mapping[int, Failure], number: int, before: int) -> str:
        """A sentence about the event in step `number`, and which plan took over."""
        now = self.levers.fitted
        return (
            f"step {number}: {in_words(failures)}; it is undone on all ranks and runs again with a tighter plan: "
            f"{format_bytes(now.planned.peak_bytes)} instead of {format_bytes(before)}, "
            f"{now.words()}; batch and schedule stay unchanged"
        )

    def _planned(self, bound: int, peak: int) -> bytes:
        found = tighter(self.make, bound, peak)
        return b"" if found is None else fit_as_json(found, is_stored=False)

    def _with_budget(self, fitted: Fit) -> Fit:
        """The plan with the user's budget, where there is one, not with the bound that it was made for."""
        budget = self.levers.fitted.budget_bytes
        if budget is None or fitted.plan is None:
            return fitted
        return replace(fitted, plan=replace(fitted.plan, budget_bytes=budget))
