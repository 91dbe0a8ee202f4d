"""Finds the fastest combination of levers whose true peak is within the budget.

Some levers concern the whole step (micro-batches, chunked loss). For each combination of these, the search solves the
choices inside blocks exactly. It tries the combinations with the fewest micro-batches first. It does not solve a
combination whose step is slower than the best plan even without recomputation. Each solution is traced as applied. If
that trace exceeds the budget, the search lowers the bound by the excess and solves again.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tightfit.errors import CompileError, LeverError
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.levers.recompute.rule import every_block
from tightfit.planner.blocks.pricing import Priced, price
from tightfit.planner.blocks.solve import least_peak, solve
from tightfit.planner.levers import Combination, Lever, Recompute, Role, lever_types
from tightfit.planner.records import Rejected
from tightfit.planner.request import optimizer_peak
from tightfit.planner.search.beside_imports import priced_beside_imports
from tightfit.planner.search.candidates import (
    UNSEEN_BYTES,
    Baseline,
    Candidate,
    accumulation_seconds,
    loop_seconds,
)
from tightfit.planner.search.capturing import capture_blocks
from tightfit.planner.search.fusing import fuse_blocks
from tightfit.planner.search.selection import Selection
from tightfit.tracing.record import Phase, StepTrace

TIGHTENINGS = 6  # how often a plan whose trace is over the budget is solved again


@dataclass
class Search(Selection):
    """Mutable: the combinations priced so far, beside the candidates."""

    priced: dict[Combination, Baseline] = field(default_factory=dict)
    resorts: bool = True  # whether last-resort levers and segments are tried where nothing else fits
    lower_bound: float = math.inf  # seconds of a step that no choice without a proof of optimality can undercut

    def run(self) -> Candidate:
        """The fastest candidate within the budget. Raises `CannotFit` with the least peak found."""
        plain = self.request.plain
        routed = self.tracer.routed_peaks(self.plain, plain, {})
        # One peak means that routing changed no level of the plain step. Candidates then need no traces per routing.
        self.routing_matters = len(routed) > 1
        self.consider(Candidate(plain, {}, (), self.plain, worst_bytes=max(routed, default=None)), "no lever")
        if self.best is None:
            self.forbidden()
            self.solve_combinations()
        elif self.request.compiles:
            self.solve_below_plain()
        capture_blocks(self)
        if self.best is None and self.resorts:
            self.try_last_resorts()
        if self.best is None and self.resorts:
            self.join_segments()
        if self.best is None:
            raise self.cannot_fit()
        return self.best

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

    def solve_combinations(self) -> None:
        """Solve every combination. With `fewest_micro_batches`, stop at the first number of micro-batches that fits."""
        waiting: list[Combination] = []  # solved, but not yet tried with compiled blocks
        combinations = self.combinations()
        self.priced |= priced_beside_imports(self, combinations, self.baseline)
        for _, alike in itertools.groupby(combinations, key=lambda combination: combination.micro_batches):
            for combination in alike:
                self.solve_blocks(combination)
                waiting.append(combination)
            # `micro_batches="auto"` promises the largest micro-batch that fits, even if smaller ones run faster.
            if self.request.fewest_micro_batches:
                self.compile_blocks(waiting)
                waiting = []
                if self.best is not None:
                    return
        self.compile_blocks(waiting)

    def solve_below_plain(self) -> None:
        """Solve every combination within the plain peak. Within more, plain blocks are the cheapest that is guessed."""
        budget_bytes = self.budget_bytes
        self.budget_bytes = min(budget_bytes, self.plain.peak_bytes)
        self.solve_combinations()
        self.budget_bytes = budget_bytes

    def compile_blocks(self, combinations: Sequence[Combination]) -> None:
        """Try compiled blocks beside these combinations: under the plan's choices, or else with PyTorch's own."""
        kinds = self.of_role(Role.WHOLE_BLOCKS)
        if not kinds or not combinations:
            return
        if fuse_blocks(self, [self.priced[each] for each in combinations if each in self.priced]):
            return
        for combination in combinations:
            for kind in kinds:
                self.try_whole_blocks(combination, kind)

    def try_whole_blocks(self, combination: Combination, kind: type[Lever]) -> None:
        """Try a lever that changes whole blocks, its fastest setting first, until one fits. Then use the faster
        settings before it in as many blocks as the budget allows.
        """
        # No bisection over the settings: with PyTorch's `activation_memory_budget` the peak need not fall from one
        # share to the next, so each setting is traced as applied.
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
                # One share for all blocks is coarse: one step up may be far too much. Blocks that keep more use the
                # memory that is left, which made CPU26 5% faster at the same peak (docs/lab-notes.md).
                for higher in dict.fromkeys(over[-1:] + over[:1]):
                    self.mix(combination, setting, higher)
                return
            if self.best is not None and candidate.seconds >= self.best.seconds:
                return  # settings come fastest first, so the next ones are slower still
            over.append(setting)

    def mix(self, combination: Combination, setting: Lever, higher: Lever) -> None:
        """Use the faster setting `higher`, which exceeds the budget in all blocks, in as many blocks as fit."""
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
        """Add the last-resort levers to the combination of least peak, one setting at a time, until one fits."""
        assert self.least is not None, "the plain step was traced"
        # Solving puts recompute on blocks, which compiled blocks refuse (RECOMPUTE_AND_COMPILED_BLOCKS).
        least = self.least.combination.without(*self.of_role(Role.WHOLE_BLOCKS), *self.of_role(Role.EXECUTION))
        for kind in self.of_role(Role.LAST):
            for setting in kind.settings(self.step()):
                combination = least.with_lever(setting)
                try:
                    self.solve_blocks(combination)
                except LeverError as error:  # a module whose input is not one tensor (B, T, n) cannot be tiled
                    self.rejected.append(Rejected(str(combination), str(error)))
                    break
                if self.best is not None:
                    return

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
        how = {
            "fixed_bytes": optimizer_peak(self.plain),
            "levers": inside,
            "executor": self.request.executor,
            "beside": self.request.device.kind == "cuda",
            "shifted": self.request.world is not None,
        }
        priced = price(self.request.model, self.paths, trace, **how) if self.paths and inside else None
        return replace(self.unpriced(combination, part), priced=priced)

    def unpriced(self, combination: Combination, part: StepTrace) -> Baseline:
        """A combination whose blocks are not priced, of which the trace with nothing recomputed is known."""
        peak = max(part.peak_bytes, optimizer_peak(self.plain))
        return Baseline(combination, peak, self.with_optimizer(part), None)

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
            # Prices are those of single blocks. Only the trace as applied counts against the budget: it also covers the
            # device's room and the worst routing.
            excess = self.excess(candidate)
            if excess <= 0:
                if solution.gap_seconds is not None:
                    # The sweep stopped at its widest: the plan reports how much faster another choice could be.
                    self.lower_bound = min(self.lower_bound, candidate.seconds - solution.gap_seconds)
                self.consider(candidate, f"{combination}, blocks solved")
                return
            # From the solution's own peak: a bound between that and the old bound would give the same solution again.
            bound = min(bound, solution.peak_bytes) - excess

    def take_solution_in_memory(self, combination: Combination, priced: Priced) -> None:
        """On CUDA, also try the best choice without offload."""
        # The copies of neighbouring blocks wait for each other, and prices of single blocks do not show that. A decoder
        # on an H200 came out at 271 ms with offload where recompute alone took 146 ms (docs/lab-notes.md).
        if self.request.device.kind != "cuda" or not self.request.may(Recompute) or self.best is None:
            return
        if any(policy.offloads for policy in self.best.policies.values()):
            self.take_solution(combination, priced.in_memory())

    def take_least(self, combination: Combination, priced: Priced) -> None:
        # Only while nothing fits: `CannotFit` reports the least peak, and last resorts and segments start from it.
        if self.best is None:
            solution = least_peak(priced.chain)
            self.consider(
                self.trace_applied(combination, priced.policies(solution.choice), priced, solution.choice),
                f"{combination}, blocks at their least",
            )

    def join_segments(self) -> None:
        """Join blocks to segments, which also recompute the blocks' outputs. That is slower, and needs less memory in
        models of many blocks.
        """
        if not self.request.may(Recompute) or not self.paths or self.least is None:
            return
        world = self.request.world
        if world is not None and world.is_sharded and world.sharding.reshard_after_forward is not False:
            return  # a segment recomputes several blocks at once, and FSDP2 has gathered the weights of one
        if self.least.trace.peak_operator.phase is Phase.OPTIMIZER:
            return  # segments lower only forward and backward
        combination = self.least.combination.without(*self.of_role(Role.WHOLE_BLOCKS), *self.of_role(Role.EXECUTION))
        for segments in segment_counts(len(self.paths)):
            rule = every_block(self.paths, segments=segments)
            part = self.tracer.part(combination, rule.policies, self.plain, rule.joined)
            if part.peak_bytes >= self.least.peak_bytes:
                continue  # the trace of a part suffices to see that this is no gain, and costs less than a whole step
            self.consider(
                self.trace_applied(combination, rule.policies, joined=rule.joined),
                f"{combination}, {segments} segments",
            )
            if self.best is not None:
                return

    def gap_seconds(self, candidate: Candidate) -> float:
        """Seconds by which another choice inside blocks may be faster than the best candidate. Zero if every choice was
        proved optimal, and for candidates other than the best, which claim nothing.
        """
        return max(0.0, candidate.seconds - self.lower_bound) if candidate is self.best else 0.0

    def forbidden(self) -> None:
        """Record which levers were not allowed, and which have nothing to work on in this model."""
        for kind in lever_types():
            if not self.request.may(kind):
                why = None if kind.on_request else "not among the levers that were allowed"
            else:
                why = kind.why_not(self.step())
            if why is not None:
                self.rejected.append(Rejected(kind.title, why))


def segment_counts(blocks: int) -> list[int]:
    """The numbers of segments worth a trace, largest first.

    For each possible length of the longest segment, that is the smallest number of segments. More segments of the same
    greatest length would keep more outputs and lower no segment's own peak.
    """
    return sorted({math.ceil(blocks / length) for length in range(2, blocks + 1)}, reverse=True)
