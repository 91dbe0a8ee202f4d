"""Finds the fastest combination of levers whose true peak is within the budget.

The choices inside blocks are solved exactly for each combination of the choices that concern the whole step (micro-
batches, chunked loss). Combinations are tried cheapest first, and those whose step without any recomputation is
already slower than the best plan are not solved. What is found is traced as applied before it is returned; where
that is over the budget, the bound is tightened by the excess and solved again.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tightfit.errors import CannotFit, CompileError, LeverError
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.levers.recompute.rule import every_block
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.blocks.pricing import Priced, price
from tightfit.planner.blocks.solve import least_peak, solve
from tightfit.planner.levers import Combination, Lever, Offload, PlainStep, Recompute, Role, lever_types
from tightfit.planner.records import DeviceRoom, Rejected
from tightfit.planner.request import Request, Tracer, lacking, optimizer_peak
from tightfit.planner.search.candidates import (
    UNSEEN_BYTES,
    Baseline,
    Candidate,
    accumulation_seconds,
    describe_levers,
    loop_seconds,
)
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.record import Phase, StepTrace
from tightfit.units import format_bytes, is_share_of, parse_budget

Applied = tuple[Combination, frozenset[tuple[str, Policy]], tuple[str, ...]]  # levers, as a key
TIGHTENINGS = 6  # how often a plan whose trace is over the budget is solved again


@dataclass
class Search:
    """Mutable: the best candidate so far, the least one, what was rejected, and what is priced."""

    request: Request
    budget: int | str
    best: Candidate | None = None
    least: Candidate | None = None
    rejected: list[Rejected] = field(default_factory=list)
    priced: dict[Combination, Baseline] = field(default_factory=dict)
    routing_matters: bool = False
    wholes: dict[Applied, StepTrace] = field(default_factory=dict)
    lower_bound: float = math.inf  # seconds: of the choices that were not proved, none can make a faster step

    def __post_init__(self) -> None:
        self.tracer = Tracer(self.request)
        if self.request.blocks is not None:
            find_blocks(self.request.model, self.request.blocks)  # a glob that matches nothing costs no trace

    @cached_property
    def kinds(self) -> tuple[type[Lever], ...]:
        """The levers that the plan may use."""
        return tuple(kind for kind in lever_types() if self.request.may(kind))

    def of_role(self, role: Role) -> list[type[Lever]]:
        return [kind for kind in self.kinds if kind.role is role]

    @cached_property
    def paths(self) -> list[str]:
        """Where the blocks are that levers may be put on."""
        if not any(kind.needs_blocks for kind in self.kinds):
            return []
        return find_blocks(self.request.model, self.request.blocks, self.plain)

    def step(self, plain: StepTrace | None = None) -> PlainStep:
        """The plain step as levers see it. `plain` is a step of the same model, where the search's own is not to be
        traced for that.
        """
        request = self.request
        trace = self.plain if plain is None else plain
        return PlainStep(request.model, request.batch, trace, tuple(self.paths), request.micro_batches, request.size)

    @cached_property
    def plain(self) -> StepTrace:
        """The step with no lever."""
        return self.tracer.whole(self.request.plain, {})

    @cached_property
    def budget_bytes(self) -> int:
        """The budget in bytes. One that is stated as the plain step's own peak, by our figure or as `1x` and more,
        means that step: it includes the bytes that every plan leaves free for what no dispatch mode sees.
        """
        plain = self.plain.peak_bytes
        budget = parse_budget(self.budget, device_bytes=self.request.device.memory_bytes, plain_peak_bytes=plain)
        is_plain = budget == plain or (is_share_of(self.budget, "x") and budget > plain)
        return max(budget, plain + UNSEEN_BYTES) if is_plain else budget

    def run(self) -> Candidate:
        """The best candidate. Raises `CannotFit` with the least peak found."""
        plain = self.request.plain
        routed = self.tracer.routed_peaks(self.plain, plain, {})
        self.routing_matters = len(routed) > 1
        self.consider(Candidate(plain, {}, (), self.plain, worst_bytes=max(routed, default=None)), "no lever")
        if self.best is None:
            self.forbidden()
            self.solve_combinations()
        if self.best is None:
            self.try_last_resorts()
        if self.best is None:
            self.join_segments()
        if self.best is None:
            raise self.cannot_fit()
        return self.best

    # Combinations

    def combinations(self, plain: StepTrace | None = None) -> list[Combination]:
        """Every setting of each lever with those of the others, the fewest micro-batches first. `plain` is as for
        `step`.
        """
        step = self.step(plain)
        found = [self.request.plain]
        for kind in self.of_role(Role.COMBINED):
            settings = (None, *kind.settings(step))
            found = [combination.with_lever(setting) for combination in found for setting in settings]
        return found

    def solve_combinations(self) -> None:
        """All of them; or none with more micro-batches than the first that fits, where the fewest are asked for."""
        for _, alike in itertools.groupby(self.combinations(), key=lambda combination: combination.micro_batches):
            for combination in alike:
                self.solve_blocks(combination)
                for kind in self.of_role(Role.WHOLE_BLOCKS):
                    self.try_whole_blocks(combination, kind)
            if self.request.fewest_micro_batches and self.best is not None:
                return

    def try_whole_blocks(self, combination: Combination, kind: type[Lever]) -> None:
        """The fastest setting that fits of a lever that takes blocks as they are, in as many blocks as it does; each is
        traced as applied, for the peak need not fall from one setting to the next.
        """
        over: list[Lever] = []
        for setting in kind.settings(self.step()):
            alike = combination.with_lever(setting)
            try:
                candidate = self.trace_applied(alike, {})
            except CompileError as error:
                self.rejected.append(Rejected(str(alike), str(error)))
                return
            self.consider(candidate, str(alike))
            if self.excess(candidate) <= 0:
                for higher in dict.fromkeys(over[-1:] + over[:1]):
                    self.mix(combination, setting, higher)
                return
            if self.best is not None and candidate.seconds >= self.best.seconds:
                return  # and the next settings take longer
            over.append(setting)

    def mix(self, combination: Combination, setting: Lever, higher: Lever) -> None:
        """As many blocks as fit take the faster setting, which in all of them is too much."""
        found: Candidate | None = None
        fits, over = 0, len(self.paths)
        while over - fits > 1:
            middle = (fits + over) // 2
            candidate = self.trace_applied(combination.with_lever(setting.mixed(higher, middle)), {})
            if self.excess(candidate) <= 0:
                found, fits = candidate, middle
            else:
                over = middle
        if found is not None:
            self.consider(found, str(found.combination))

    def try_last_resorts(self) -> None:
        """What takes least, with each setting of the levers for which that is the time."""
        assert self.least is not None, "the plain step was traced"
        least = self.least.combination.without(*self.of_role(Role.WHOLE_BLOCKS))
        for kind in self.of_role(Role.LAST):
            for setting in kind.settings(self.step()):
                combination = least.with_lever(setting)
                try:
                    self.solve_blocks(combination)
                except LeverError as error:  # a module that is given something else than one tensor (B, T, n)
                    self.rejected.append(Rejected(str(combination), str(error)))
                    break
                if self.best is not None:
                    return

    def baselines(self) -> list[Baseline]:
        """All combinations, priced."""
        return [self.baseline(combination) for combination in self.combinations()]

    def baseline(self, combination: Combination, part: StepTrace | None = None) -> Baseline:
        """A combination, priced; once. `part` is its trace with nothing recomputed, where that is there."""
        if combination not in self.priced:
            self.priced[combination] = self.price(combination, part or self.part(combination))
        return self.priced[combination]

    def price(self, combination: Combination, part: StepTrace) -> Baseline:
        first = [part]

        def trace(policies: Mapping[str, Policy]) -> StepTrace:
            return first.pop() if first else self.tracer.part(combination, policies, self.plain, compared=True)

        fixed = optimizer_peak(self.plain)
        inside = self.of_role(Role.INSIDE_BLOCKS)
        how = {
            "fixed_bytes": fixed,
            "levers": inside,
            "replaying_seconds": self.request.executor.replayed,
            "beside": self.request.device.kind == "cuda",
        }
        priced = price(self.request.model, self.paths, trace, **how) if self.paths and inside else None
        return Baseline(combination, max(part.peak_bytes, fixed), self.with_optimizer(part), priced)

    def part(self, combination: Combination) -> StepTrace:
        """A combination with nothing recomputed, its blocks watched."""
        return self.tracer.part(combination, dict.fromkeys(self.paths, KEEP_ALL), self.plain)

    def with_optimizer(self, part: StepTrace) -> float:
        """Seconds of a whole step of which forward and backward of the last micro-batch were traced."""
        return loop_seconds(part) - accumulation_seconds(part) + self.plain.step_seconds - loop_seconds(self.plain)

    def solve_blocks(self, combination: Combination) -> None:
        """The best choice inside blocks for one combination."""
        part = self.part(combination)
        lower_bound = self.with_optimizer(part)
        if self.best is not None and lower_bound >= self.best.seconds:
            peak = max(part.peak_bytes, optimizer_peak(self.plain))
            reason = "slower than the plan even without recomputation"
            self.rejected.append(Rejected(str(combination), reason, peak, lower_bound))
            return
        priced = self.baseline(combination, part).priced
        if priced is None:
            self.consider(self.trace_applied(combination, {}), str(combination))
            return
        self.take_solution(combination, priced)
        self.take_solution_in_memory(combination, priced)
        self.take_least(combination, priced)

    def take_solution(self, combination: Combination, priced: Priced) -> None:
        bound = self.budget_bytes - UNSEEN_BYTES
        for _ in range(TIGHTENINGS):
            solution = solve(priced.chain, bound)
            if solution is None:
                least = least_peak(priced.chain)
                self.rejected.append(
                    Rejected(f"{combination}, blocks recomputed", "over the budget at its least", least.peak_bytes)
                )
                return
            candidate = self.trace_applied(combination, priced.policies(solution.choice), priced, solution.choice)
            excess = self.excess(candidate)
            if excess <= 0:
                if solution.gap_seconds is not None:
                    self.lower_bound = min(self.lower_bound, candidate.seconds - solution.gap_seconds)
                self.consider(candidate, f"{combination}, blocks solved")
                return
            bound = min(bound, solution.peak_bytes) - excess

    def take_solution_in_memory(self, combination: Combination, priced: Priced) -> None:
        """On CUDA copies of neighbouring blocks wait for each other, which blocks by themselves do not show: the best
        choice without offload may be faster after all.
        """
        if self.request.device.kind != "cuda" or not self.request.may(Recompute) or self.best is None:
            return
        if any(policy.offloads for policy in self.best.policies.values()):
            self.take_solution(combination, priced.in_memory())

    def take_least(self, combination: Combination, priced: Priced) -> None:
        if self.best is None:
            solution = least_peak(priced.chain)
            self.consider(
                self.trace_applied(combination, priced.policies(solution.choice), priced, solution.choice),
                f"{combination}, blocks at their least",
            )

    def join_segments(self) -> None:
        """Blocks joined to segments, whose outputs are recomputed too: slower, and less memory where there are
        many. The optimizer's own peak stays where it is.
        """
        if not self.request.may(Recompute) or not self.paths or self.least is None:
            return
        if self.least.trace.peak_operator.phase is Phase.OPTIMIZER:
            return
        combination = self.least.combination.without(*self.of_role(Role.WHOLE_BLOCKS))
        for segments in segment_counts(len(self.paths)):
            rule = every_block(self.paths, segments=segments)
            part = self.tracer.part(combination, rule.policies, self.plain, rule.joined)
            if part.peak_bytes >= self.least.peak_bytes:
                continue
            self.consider(
                self.trace_applied(combination, rule.policies, joined=rule.joined),
                f"{combination}, {segments} segments",
            )
            if self.best is not None:
                return

    # Candidates

    def trace_applied(
        self,
        combination: Combination,
        policies: dict[str, Policy],
        priced: Priced | None = None,
        choice: tuple[int, ...] = (),
        joined: tuple[str, ...] = (),
    ) -> Candidate:
        trace = self.whole(combination, policies, joined)
        routed = self.tracer.routed_peaks(trace, combination, policies, joined) if self.routing_matters else []
        return Candidate(combination, policies, joined, trace, priced, choice, max(routed, default=None))

    def whole(self, combination: Combination, policies: dict[str, Policy], joined: tuple[str, ...] = ()) -> StepTrace:
        """The step with these levers, traced once."""
        key = (combination, frozenset(policies.items()), joined)
        if key not in self.wholes:
            self.wholes[key] = self.tracer.whole(combination, policies, joined)
        return self.wholes[key]

    def consider(self, candidate: Candidate, name: str) -> None:
        """Keep the candidate if it is the fastest that fits, and note why the other one is not taken."""
        if self.least is None or candidate.peak_bytes < self.least.peak_bytes:
            self.least = candidate
        if (excess := self.excess(candidate)) > 0:
            over = (
                "over the budget" if candidate.needed_bytes > self.budget_bytes else "more than the device has room for"
            )
            reason = f"{format_bytes(excess)} {over}"
            self.rejected.append(Rejected(name, reason, candidate.peak_bytes, candidate.seconds))
        elif self.best is None or candidate.seconds < self.best.seconds:
            if self.best is not None:
                self.reject_slower(self.in_words(self.best), self.best)
            self.best = candidate
        else:
            self.reject_slower(name, candidate)

    def excess(self, candidate: Candidate) -> int:
        """Bytes by which a candidate is over the budget, or, on CUDA, over what the device has room for.

        The budget means what tensors take (`max_memory_allocated`). The device also holds the allocator's segments and
        the context: together they may take all of it, or the share that a budget in per cent gives them.
        """
        over = candidate.needed_bytes - self.budget_bytes
        if over > 0 or candidate.trace.reserved_bytes is None:
            return over
        return lacking(candidate.trace, self.device_bytes)

    @property
    def device_bytes(self) -> int:
        """What allocator and context may take of the device."""
        return self.budget_bytes if is_share_of(self.budget, "%") else self.request.device.memory_bytes

    def room(self, trace: StepTrace) -> DeviceRoom | None:
        """What a step takes of a CUDA device as a whole; None on a CPU."""
        if trace.reserved_bytes is None:
            return None
        held = self.request.device.memory_bytes
        return DeviceRoom(held, trace.reserved_bytes, CONTEXT_BYTES, is_share_of(self.budget, "%"))

    def gap_seconds(self, candidate: Candidate) -> float:
        """How much faster than the best candidate another choice inside blocks may be. None is where all were proved; a
        candidate that is not the best is not taken for being the fastest, so that nothing is to be proved of it.
        """
        return max(0.0, candidate.seconds - self.lower_bound) if candidate is self.best else 0.0

    def reject_slower(self, name: str, candidate: Candidate) -> None:
        self.rejected.append(Rejected(name, "fits, but is slower", candidate.peak_bytes, candidate.seconds))

    def in_words(self, candidate: Candidate) -> str:
        return describe_levers(candidate.combination, candidate.policies, len(self.paths), len(candidate.joined))

    def forbidden(self) -> None:
        """Note which levers were not allowed, and which have nothing to work on."""
        for kind in lever_types():
            if not self.request.may(kind):
                why = None if kind.on_request else "not among the levers that were allowed"
            else:
                why = kind.why_not(self.step())
            if why is not None:
                self.rejected.append(Rejected(kind.title, why))

    def cannot_fit(self) -> CannotFit:
        assert self.least is not None, "the plain step was traced"
        least, trace = self.least, self.least.trace
        holds = max(trace.by_category().items(), key=lambda item: item[1])
        device = self.request.device
        limit, taken = f"{format_bytes(self.budget_bytes)} cannot fit", None
        if least.needed_bytes <= self.budget_bytes:  # then it is the device that has no room
            taken = (trace.reserved_bytes or 0) + CONTEXT_BYTES
            limit = (
                f"the step cannot fit {device.name}: with what the allocator reserves and the context it takes "
                f"{format_bytes(taken)} of {format_bytes(self.device_bytes)}"
            )
        return CannotFit(
            f"{limit}: the least is {format_bytes(least.needed_bytes)} "
            f"({least.needed_bytes} bytes), reached by {self.in_words(least)}; it is held up in "
            f"{trace.peak_operator.phase} at {trace.peak_operator.module or 'the top level'} "
            f"by {format_bytes(holds[1])} of {holds[0]}{self.offload_bound()}",
            least.needed_bytes,
            taken,
        )

    def offload_bound(self) -> str:
        """That offload may take no more than the user allowed, where that was said."""
        allowed = self.request.offload.budget_bytes
        if not self.request.may(Offload) or allowed is None:
            return ""
        return f"; offload may take {format_bytes(allowed)} (offload_budget)"


def segment_counts(blocks: int) -> list[int]:
    """For each length that the longest segment can have, the fewest segments; most segments first.

    More segments of the same greatest length would keep more outputs and lower no segment's own peak.
    """
    return sorted({math.ceil(blocks / length) for length in range(2, blocks + 1)}, reverse=True)
