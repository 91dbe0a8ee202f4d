"""The search for the plan of a step: its traces, what was priced, and the candidates within the budget.

The order in which levers are tried is in `fastest`. This is what each of them uses: a combination of levers is traced,
its blocks are priced and solved, the solution is traced as applied, and kept if it is the fastest that fits.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, Policy
from tightfit.planner.blocks.find import find_blocks, modules_left_out
from tightfit.planner.blocks.pricing import Priced, price
from tightfit.planner.blocks.solve import least_peak, solve
from tightfit.planner.levers import Combination, Lever, Offload, PlainStep, Recompute, Role, lever_types
from tightfit.planner.records import DeviceRoom, Rejected
from tightfit.planner.request import Request, Tracer, lacking, optimizer_peak, plain_step
from tightfit.planner.search.candidates import (
    UNSEEN_BYTES,
    Baseline,
    Candidate,
    accumulation_seconds,
    describe_levers,
    loop_seconds,
)
from tightfit.runtime.forked import processes_for, shared_out
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.units import format_bytes, is_share_of, parse_budget

SMALL = 1500  # operators of a step that is traced in no time worth naming
TIGHTENINGS = 6  # how often a plan whose trace is over the budget, or far within it, is solved again
LEAST_ROOM = 0.01  # of the budget: prices so far above the trace leave something to use
Part = TypeVar("Part")
Result = TypeVar("Result")
Applied = tuple[Combination, frozenset[tuple[str, Policy]], tuple[str, ...]]  # levers, as a key


@dataclass
class Search:
    """Mutable: the fastest candidate so far, the one of least peak, rejected combinations, traces and prices.

    What a caller knows already is given and not found again: `known_plain`, the trace of the plain step; `known_paths`,
    the blocks; `limit_bytes`, the budget in bytes, which may also be a part of the budget. `tracer` is another way to
    run the step dry. Without `resorts`, levers that are tried only where nothing else fits are left out.
    """

    request: Request
    budget: int | str
    resorts: bool = True
    tracer: Tracer = None  # pyright: ignore[reportAssignmentType] - that of the request
    known_plain: StepTrace | None = None
    known_paths: list[str] | None = None
    limit_bytes: int | None = None
    routing_matters: bool = False
    best: Candidate | None = None
    least: Candidate | None = None
    joinable: Candidate | None = None  # the one of least peak whose blocks may be joined to segments
    solved: Candidate | None = None  # the fastest that fits without compiled or captured blocks
    mixed: Combination | None = None  # the one whose blocks were solved with compiled and captured options together
    rejected: list[Rejected] = field(default_factory=list)
    wholes: dict[Applied, StepTrace] = field(default_factory=dict)
    priced: dict[Combination, Baseline] = field(default_factory=dict)
    lower_bound: float = math.inf  # seconds of a step that no choice without a proof of optimality can undercut

    def __post_init__(self) -> None:
        self.tracer = self.tracer or Tracer(self.request)
        if self.request.blocks is not None:
            find_blocks(self.request.model, self.request.blocks)  # raises for a wrong glob before the first trace

    @cached_property
    def kinds(self) -> tuple[type[Lever], ...]:
        """The levers that the plan may use."""
        return tuple(kind for kind in lever_types() if self.request.may(kind))

    def of_role(self, role: Role) -> list[type[Lever]]:
        return [kind for kind in self.kinds if kind.role is role]

    @property
    def paths(self) -> list[str]:
        """Module paths of the blocks, in the order in which they run. Empty if no allowed lever needs blocks."""
        if self.known_paths is None:
            # Finding the blocks reads the plain trace, so a search without such levers does not pay for it.
            may_need = any(kind.needs_blocks for kind in self.kinds)
            request = self.request
            self.known_paths = find_blocks(request.model, request.blocks, self.plain) if may_need else []
            for why, count in Counter(modules_left_out(self.plain).values() if may_need else ()).items():
                self.rejected.append(Rejected(f"levers of blocks (modules left out: {count})", why))
        return self.known_paths

    @cached_property
    def outcomes(self) -> list[StepTrace]:
        """The plain step with each outcome of numbers that it reads; none where no block may recompute."""
        if not self.request.has_outcomes(self.plain) or not self.request.may(Recompute):
            return []
        return [replace(self.tracer, numbers=each).whole(self.request.plain, {}) for each in self.request.outcomes]

    @cached_property
    def elsewhere(self) -> dict[str, Policy]:
        """The policies of blocks that run in other outcomes of numbers read than the one that is solved.

        They keep nothing. So where one stands in for a block of that outcome, it holds no more than that one.
        """
        found = [find_blocks(self.request.model, self.request.blocks, trace) for trace in self.outcomes]
        return {path: RECOMPUTE_ALL for paths in found for path in paths if path not in self.paths}

    @cached_property
    def drawn_again(self) -> dict[str, Policy]:
        """The policies of blocks that are drawn from several, so that one of them may run more often than in the
        outcome that is solved.

        That may be any of them, so all keep nothing.
        """
        here, *others = (Counter(call.path for call in trace.calls) for trace in (self.plain, *self.outcomes))
        if not any(0 < here[path] < other[path] for path in self.paths for other in others):
            return {}
        return {path: RECOMPUTE_ALL for path in self.paths if any(other[path] != here[path] for other in others)}

    def step(self, plain: StepTrace | None = None) -> PlainStep:
        """The plain step as levers see it. `plain` replaces the search's own trace by another one of the same model,
        which saves a trace.
        """
        request = self.request
        trace = self.plain if plain is None else plain
        return plain_step(request, trace, self.paths)

    @property
    def plain(self) -> StepTrace:
        """The step with no lever."""
        if self.known_plain is None:
            self.known_plain = self.whole(self.request.plain, {})
        return self.known_plain

    @property
    def is_small(self) -> bool:
        """True if a whole trace of the step costs next to nothing."""
        return len(self.plain.operators) <= SMALL

    def shared(self, work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """The result of `work` for each part, such as a trace that depends on no other one.

        Long traces are shared among forks of this process, where it may be forked. A fork sends back nothing else.
        """
        processes = 1 if self.is_small else processes_for(len(parts))
        if processes == 1:
            return [work(part) for part in parts]

        # A part goes to a fork by its number: the fork has it already.
        def numbered(number: int, notice: object) -> Result:
            return work(parts[number])

        return shared_out(numbered, range(len(parts)), lambda line: None, processes)

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        if self.limit_bytes is None:
            plain = self.plain.peak_bytes
            budget = parse_budget(self.budget, device_bytes=self.request.device.memory_bytes, plain_peak_bytes=plain)
            # Every plan leaves `UNSEEN_BYTES` free. Without them on top, a budget of `1x`, or of the peak that
            # `estimate` printed, would reject the plain step itself.
            is_plain = budget == plain or (is_share_of(self.budget, "x") and budget > plain)
            self.limit_bytes = max(budget, plain + UNSEEN_BYTES) if is_plain else budget
        return self.limit_bytes

    def trace_applied(
        self,
        combination: Combination,
        policies: dict[str, Policy],
        priced: Priced | None = None,
        choice: tuple[int, ...] = (),
        joined: tuple[str, ...] = (),
    ) -> Candidate:
        policies = {**self.elsewhere, **policies, **self.drawn_again} if policies else policies
        trace = self.whole(combination, policies, joined)
        routed = self.tracer.routed_peaks(trace, combination, policies, joined) if self.routing_matters else []
        return Candidate(combination, policies, joined, trace, priced, choice, max(routed, default=None))

    def whole(self, combination: Combination, policies: dict[str, Policy], joined: tuple[str, ...] = ()) -> StepTrace:
        """The step with these levers, traced once."""
        key = (combination, frozenset(policies.items()), joined)
        if key not in self.wholes:
            self.wholes[key] = self.tracer.whole(combination, policies, joined)
        return self.wholes[key]

    @property
    def is_held_by_update(self) -> bool:
        """True if nothing fits, and the least peak found is of weights, gradients and states in the optimizer's phase.

        No lever of forward and backward lowers that.
        """
        if self.best is not None or self.least is None:
            return False
        trace = self.least.trace
        is_update = trace.peak_operator.phase is Phase.OPTIMIZER
        return is_update and trace.by_category()[Category.ACTIVATION] <= UNSEEN_BYTES  # a loss, and its parts

    def consider(self, candidate: Candidate, name: str) -> None:
        """Keep the candidate if it is the fastest that fits, and record why the slower one is rejected."""
        if self.least is None or candidate.peak_bytes < self.least.peak_bytes:
            self.least = candidate
        if self.joinable is None or candidate.peak_bytes < self.joinable.peak_bytes:
            roles = (Role.WHOLE_BLOCKS, Role.EXECUTION, Role.WEIGHTS)  # a segment needs several blocks at once
            if not any(candidate.combination.get(kind) for role in roles for kind in self.of_role(role)):
                self.joinable = candidate
        if (excess := self.excess(candidate)) > 0:
            over = (
                "over the budget" if candidate.needed_bytes > self.budget_bytes else "more than the device has room for"
            )
            reason = f"{format_bytes(excess)} {over}"
            self.rejected.append(Rejected(name, reason, candidate.peak_bytes, candidate.seconds))
            return
        if self.solved is None or candidate.seconds < self.solved.seconds:
            whole = (*self.of_role(Role.WHOLE_BLOCKS), *self.of_role(Role.EXECUTION))
            if not any(candidate.combination.get(kind) for kind in whole):
                self.solved = candidate
        if self.best is None or candidate.seconds < self.best.seconds:
            if self.best is not None:
                self.reject_slower(self.in_words(self.best), self.best)
            self.best = candidate
        else:
            self.reject_slower(name, candidate)

    def excess(self, candidate: Candidate) -> int:
        """Bytes by which a candidate exceeds the budget or, on CUDA, the memory of the device.

        The budget limits allocated bytes (`max_memory_allocated`). The allocator's segments and the context must also
        fit on the device, or in the share of it that a budget in per cent names.
        """
        over = candidate.needed_bytes - self.budget_bytes
        if over > 0 or candidate.trace.reserved_bytes is None:
            return over
        return lacking(candidate.trace, self.device_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that allocator and context may use together."""
        held = self.budget_bytes if is_share_of(self.budget, "%") else self.request.device.memory_bytes
        return held - self.request.communicator_bytes

    def room(self, trace: StepTrace) -> DeviceRoom | None:
        """Memory that a step uses of a CUDA device, with allocator and context; None on a CPU."""
        if trace.reserved_bytes is None:
            return None
        held = self.request.device.memory_bytes
        return DeviceRoom(held, trace.reserved_bytes, CONTEXT_BYTES, is_share_of(self.budget, "%"))

    def reject_slower(self, name: str, candidate: Candidate) -> None:
        self.rejected.append(Rejected(name, "fits, but is slower", candidate.peak_bytes, candidate.seconds))

    def in_words(self, candidate: Candidate) -> str:
        return describe_levers(candidate.combination, candidate.policies, len(self.paths), len(candidate.joined))

    # Combinations

    def combinations(self, plain: StepTrace | None = None) -> list[Combination]:
        """The product of all settings of the combined levers, each of which may also be off. The fewest micro-batches
        come first. `plain` is as for `step`.
        """
        step = self.step(plain)
        found = [self.request.plain]
        for kind in self.of_role(Role.COMBINED):
            settings = (None, *kind.settings(step))
            found = [combination.with_lever(setting) for combination in found for setting in settings]
        return found

    # Choices inside blocks

    def baselines(self) -> list[Baseline]:
        """All combinations, priced."""
        combinations = self.combinations()
        waiting = [combination for combination in combinations if combination not in self.priced]
        self.priced |= zip(waiting, self.shared(self.baseline, waiting), strict=True)
        return [self.priced[combination] for combination in combinations]

    def baseline(self, combination: Combination, part: StepTrace | None = None) -> Baseline:
        """A combination with its prices, computed once. `part`: its trace with nothing recomputed, if already made."""
        if combination not in self.priced:
            self.priced[combination] = self.price(combination, part or self.part(combination))
        return self.priced[combination]

    def price(self, combination: Combination, part: StepTrace) -> Baseline:
        first = [part]  # `price` asks first for the trace that keeps everything, which the caller has made already

        def trace(policies: Mapping[str, Policy]) -> StepTrace:
            return first.pop() if first else self.tracer.part(combination, policies, self.plain, compared=True)

        inside = self.of_role(Role.INSIDE_BLOCKS)
        if not self.paths or not inside:
            return self.unpriced(combination, part)
        priced = price(
            self.request.model,
            self.paths,
            trace,
            fixed_bytes=self.fixed_bytes(part),
            levers=inside,
            executor=self.request.executor,
            in_parallel=self.request.device.kind == "cuda",
            shifted=self.request.world is not None,
        )
        return replace(self.unpriced(combination, part), priced=priced)

    def unpriced(self, combination: Combination, part: StepTrace) -> Baseline:
        """A combination whose blocks are not priced, of which the trace with nothing recomputed is known."""
        peak = max(part.peak_bytes, self.fixed_bytes(part))
        return Baseline(combination, peak, self.with_optimizer(part), None)

    def fixed_bytes(self, part: StepTrace) -> int:
        """The highest level of the optimizer's phase, without the weights that the levers of a part stream."""
        held = [trace.by_category(0)[Category.PARAMETER] for trace in (self.plain, part)]
        return optimizer_peak(self.plain) - (held[0] - held[1])

    def part(self, combination: Combination) -> StepTrace:
        """Trace of a combination with nothing recomputed, in which the recorder observes the blocks."""
        # KEEP_ALL, not an empty mapping: only operators of observed blocks have a region and an occurrence.
        return self.tracer.part(combination, dict.fromkeys(self.paths, KEEP_ALL), self.plain)

    def with_optimizer(self, part: StepTrace) -> float:
        """Seconds of a whole step, from a trace of forward and backward of its last micro-batch.

        The optimizer's seconds are those of the plain step. The first micro-batch adds to no gradients.
        """
        return loop_seconds(part) - accumulation_seconds(part) + self.plain.step_seconds - loop_seconds(self.plain)

    def solve_blocks(self, combination: Combination) -> None:
        """Solve the choices inside blocks for one combination, and consider the solution."""
        # Recompute and offload only add seconds to a step that keeps everything, so this bounds all choices. It costs
        # one trace, where prices cost several.
        bounds, part = self.priced.get(combination), None
        if bounds is None:
            part = self.part(combination)
            bounds = self.unpriced(combination, part)
        if self.best is not None and bounds.seconds >= self.best.seconds:
            reason = "slower than the plan even without recomputation"
            self.rejected.append(Rejected(str(combination), reason, bounds.peak_bytes, bounds.seconds))
            return
        priced = self.baseline(combination, part).priced
        if priced is None:
            self.consider(self.trace_applied(combination, {}), str(combination))
            return
        self.take_solution(combination, priced)
        self.take_solution_in_memory(combination, priced)
        self.take_least(combination, priced)

    def take_solution(self, combination: Combination, priced: Priced) -> None:
        if not self.take_within(self.budget_bytes - UNSEEN_BYTES, combination, priced, []):
            least = least_peak(priced.chain)
            self.rejected.append(
                Rejected(f"{combination}, blocks recomputed", "over the budget at its least", least.peak_bytes)
            )

    def take_within(self, bound: int, combination: Combination, priced: Priced, tried: list[tuple[int, ...]]) -> bool:
        """Solve within a bound on the prices, and again, until the trace is within the budget and near to it.

        Returns False where the last bound is below the least of the prices.
        """
        for _ in range(TIGHTENINGS):
            solution = solve(priced.chain, bound)
            if solution is None or solution.choice in tried:
                return solution is not None
            tried.append(solution.choice)
            candidate = self.trace_applied(combination, priced.policies(solution.choice), priced, solution.choice)
            # Prices are those of single blocks. Only the trace as applied counts against the budget: it also covers the
            # device's room and the worst routing.
            excess = self.excess(candidate)
            if excess <= 0:
                if solution.gap_seconds is not None:
                    # The sweep stopped at its widest: the plan reports how much faster another choice could be.
                    self.lower_bound = min(self.lower_bound, candidate.seconds - solution.gap_seconds)
                self.consider(candidate, f"{combination}, blocks solved")
                # Under autocast a block holds copies of its weights that forward's end frees, so prices may be above
                # the trace. What that leaves of the budget is room for a faster choice.
                if solution.peak_bytes - candidate.needed_bytes < LEAST_ROOM * self.budget_bytes:
                    return True
                excess = candidate.needed_bytes - self.budget_bytes
            # From the solution's own peak: a bound between that and the old bound would give the same solution again.
            bound = solution.peak_bytes - excess
        return True

    def take_solution_in_memory(self, combination: Combination, priced: Priced) -> None:
        """On CUDA, also try the best choice without offload."""
        # The copies of neighbouring blocks wait for each other, and prices of single blocks do not show that. A decoder
        # on an H200 came out at 271 ms with offload where recompute alone took 146 ms (notes/).
        if self.request.device.kind != "cuda" or not self.request.may(Recompute) or self.best is None:
            return
        if any(policy.offloads for policy in self.best.policies.values()):
            self.take_solution(combination, priced.in_memory())

    def take_least(self, combination: Combination, priced: Priced) -> None:
        # Only while nothing fits: `CannotFit` reports the least peak, and last resorts and segments start from it.
        if self.best is None:
            solution = least_peak(priced.chain)
            least = self.trace_applied(combination, priced.policies(solution.choice), priced, solution.choice)
            self.consider(least, f"{combination}, blocks at their least")
            if self.excess(least) <= 0:
                room = self.budget_bytes - least.needed_bytes
                self.take_within(solution.peak_bytes + room, combination, priced, [solution.choice])
            elif self.request.device.kind == "cuda" and Offload in self.of_role(Role.INSIDE_BLOCKS):
                self.take_inputs_offloaded(combination, least)

    def take_inputs_offloaded(self, combination: Combination, least: Candidate) -> None:
        """Consider that all blocks offload their inputs and nothing else, where that takes less than `least`."""
        # What a card sends away is held until its copy has ended: as much as the block that sends most. Prices of
        # single blocks do not show that.
        policies = dict.fromkeys(self.paths, Offload.frugal_policy(self.request.levers))
        part = self.tracer.part(combination, policies, self.plain)
        if max(part.peak_bytes, self.fixed_bytes(part)) < least.peak_bytes:
            self.consider(self.trace_applied(combination, policies), f"{combination}, inputs of blocks offloaded")

    def gap_seconds(self, candidate: Candidate) -> float:
        """Seconds by which another choice inside blocks may be faster than the best candidate. Zero if every choice was
        proved optimal, and for candidates other than the best, which claim nothing.
        """
        return max(0.0, candidate.seconds - self.lower_bound) if candidate is self.best else 0.0
