"""Finds the fastest combination of levers whose true peak is within the budget.

Some levers concern the whole step (micro-batches, chunked loss). For each combination of these, the search solves the
choices inside blocks exactly. It tries the combinations with the fewest micro-batches first. It does not solve a
combination whose step is slower than the best plan even without recomputation. Each solution is traced as applied. If
that trace exceeds the budget, the search lowers the bound by the excess and solves again.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tightfit.errors import CannotFit, CompileError, LeverError
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.levers.recompute.rule import every_block
from tightfit.planner.blocks.captured import priced_as_captured, saved_seconds
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.blocks.pricing import Priced, price
from tightfit.planner.blocks.solve import least_peak, peak, solve
from tightfit.planner.levers import CapturedBlocks, Combination, Lever, Offload, PlainStep, Recompute, Role, lever_types
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
LEAST_SAVING = 0.002  # of a step: where capturing saves less by its prices, no trace is spent on it
LEAST_GAIN = 0.01  # of a step: where a second choice for captured blocks gains less, no trace is spent on it
NEARLY = 0.9  # of the least peak: captured blocks need a few per cent less than recorded ones, at most
TIGHTENINGS = 6  # how often a plan whose trace is over the budget is solved again


@dataclass
class Search:
    """Mutable: the fastest candidate so far, the one of least peak, rejected combinations, and priced combinations."""

    request: Request
    budget: int | str
    best: Candidate | None = None
    least: Candidate | None = None
    solved: Candidate | None = None  # the fastest that fits without compiled or captured blocks
    rejected: list[Rejected] = field(default_factory=list)
    priced: dict[Combination, Baseline] = field(default_factory=dict)
    routing_matters: bool = False
    wholes: dict[Applied, StepTrace] = field(default_factory=dict)
    resorts: bool = True  # whether last-resort levers and segments are tried where nothing else fits
    lower_bound: float = math.inf  # seconds of a step that no choice without a proof of optimality can undercut

    def __post_init__(self) -> None:
        self.tracer = Tracer(self.request)
        if self.request.blocks is not None:
            find_blocks(self.request.model, self.request.blocks)  # raises for a wrong glob before the first trace

    @cached_property
    def kinds(self) -> tuple[type[Lever], ...]:
        """The levers that the plan may use."""
        return tuple(kind for kind in lever_types() if self.request.may(kind))

    def of_role(self, role: Role) -> list[type[Lever]]:
        return [kind for kind in self.kinds if kind.role is role]

    @cached_property
    def paths(self) -> list[str]:
        """Module paths of the blocks, in the order in which they run. Empty if no allowed lever needs blocks."""
        # Finding the blocks reads the plain trace, so a search without such levers does not pay for it.
        if not any(kind.needs_blocks for kind in self.kinds):
            return []
        return find_blocks(self.request.model, self.request.blocks, self.plain)

    def step(self, plain: StepTrace | None = None) -> PlainStep:
        """The plain step as levers see it. `plain` replaces the search's own trace by another one of the same model,
        which saves a trace.
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
        """The budget in bytes."""
        plain = self.plain.peak_bytes
        budget = parse_budget(self.budget, device_bytes=self.request.device.memory_bytes, plain_peak_bytes=plain)
        # Every plan leaves `UNSEEN_BYTES` free. Without them on top, a budget of `1x`, or of the peak that `estimate`
        # printed, would reject the plain step itself.
        is_plain = budget == plain or (is_share_of(self.budget, "x") and budget > plain)
        return max(budget, plain + UNSEEN_BYTES) if is_plain else budget

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
        self.capture_blocks()
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
        for _, alike in itertools.groupby(self.combinations(), key=lambda combination: combination.micro_batches):
            for combination in alike:
                self.solve_blocks(combination)
                for kind in self.of_role(Role.WHOLE_BLOCKS):
                    self.try_whole_blocks(combination, kind)
            # `micro_batches="auto"` promises the largest micro-batch that fits, even if smaller ones run faster.
            if self.request.fewest_micro_batches and self.best is not None:
                return

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

    def baselines(self) -> list[Baseline]:
        """All combinations, priced."""
        return [self.baseline(combination) for combination in self.combinations()]

    def baseline(self, combination: Combination, part: StepTrace | None = None) -> Baseline:
        """A combination with its prices, computed once. `part`: its trace with nothing recomputed, if already made."""
        if combination not in self.priced:
            self.priced[combination] = self.price(combination, part or self.part(combination))
        return self.priced[combination]

    def price(self, combination: Combination, part: StepTrace) -> Baseline:
        first = [part]  # `price` asks first for the trace that keeps everything, which the caller has made already

        def trace(policies: Mapping[str, Policy]) -> StepTrace:
            return first.pop() if first else self.tracer.part(combination, policies, self.plain, compared=True)

        fixed = optimizer_peak(self.plain)
        inside = self.of_role(Role.INSIDE_BLOCKS)
        how = {
            "fixed_bytes": fixed,
            "levers": inside,
            "replaying_seconds": self.request.executor.replayed,
            "beside": self.request.device.kind == "cuda",
            "shifted": self.request.world is not None,
        }
        priced = price(self.request.model, self.paths, trace, **how) if self.paths and inside else None
        return Baseline(combination, max(part.peak_bytes, fixed), self.with_optimizer(part), priced)

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
        part = self.part(combination)
        # Recompute and offload only add seconds to a step that keeps everything, so this bounds all choices. It costs
        # one trace, where prices cost several.
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

    # Captured blocks

    def capture_blocks(self) -> None:
        """Run the blocks of the fastest plan so far as captured programs, where that is faster, or fits at last.

        Other combinations are not tried: blocks of one kind and policy are captured anew for each shape, which takes
        longer than their traces.
        """
        base = self.solved or self.least
        if not self.request.may(CapturedBlocks) or not self.paths or base is None:
            return
        if any(base.combination.get(kind) for kind in self.of_role(Role.WHOLE_BLOCKS)):
            return  # compiled blocks are the least, and nothing fits: a block is compiled or captured
        if self.best is None and self.budget_bytes < NEARLY * base.needed_bytes:
            return
        paths = tuple(path for path in self.paths if not base.policies.get(path, KEEP_ALL).offloads)
        saved = saved_seconds(base.trace, paths, self.request.executor)
        if self.best is not None and saved < LEAST_SAVING * base.seconds:
            reason = f"would save less than {LEAST_SAVING:.1%} of the step"
            self.rejected.append(Rejected(CapturedBlocks.title, reason))
            return
        is_solved = base.priced is not None and len(paths) == len(self.paths)
        if is_solved and self.best is not None:
            # Recording the policies of the plan so far too would take as long as a trace.
            self.solve_captured(base, paths, 0)
            return
        candidate = self.trace_captured(base, base.policies, base.choice, paths)
        if candidate is None:
            return
        self.consider(candidate, str(candidate.combination))
        if is_solved and base.priced is not None:
            self.solve_captured(base, paths, peak(base.priced.chain, base.choice) - candidate.peak_bytes)

    def solve_captured(self, base: Candidate, paths: tuple[str, ...], room: int) -> None:
        """Solve the choices inside blocks again, with the prices of captured blocks.

        `room` is the number of bytes that they need less than the recorded blocks of `base`.
        """
        assert base.priced is not None, "blocks are solved by their prices"
        again = priced_as_captured(
            base.priced, paths, self.request.executor, base.trace, base.combination.micro_batches
        )
        bound = self.budget_bytes - UNSEEN_BYTES + room
        tried, fits = [base.policies] if room else [], math.inf
        for _ in range(TIGHTENINGS):
            solution = solve(again.chain, bound)
            if solution is None or (policies := again.policies(solution.choice)) in tried:
                return
            if solution.seconds > fits - LEAST_GAIN * base.seconds:
                return
            tried.append(policies)
            candidate = self.trace_captured(base, policies, solution.choice, paths)
            if candidate is None:
                return
            candidate = replace(candidate, priced=again)
            self.consider(candidate, f"{candidate.combination}, blocks solved")
            excess = self.excess(candidate)
            if math.isfinite(fits):
                return
            if excess > 0:
                bound = min(bound, solution.peak_bytes) - excess
            else:
                # What captured blocks do not take is room for a faster choice.
                fits = solution.seconds
                bound = self.budget_bytes - UNSEEN_BYTES + solution.peak_bytes - candidate.peak_bytes

    def trace_captured(
        self, base: Candidate, policies: dict[str, Policy], choice: tuple[int, ...], paths: tuple[str, ...]
    ) -> Candidate | None:
        """The step with the blocks at `paths` captured; None if none of them can be. Says why others are not."""
        combination = base.combination.with_lever(CapturedBlocks(paths))
        candidate = self.trace_applied(combination, policies, base.priced, choice)
        refused = dict(self.tracer.refused)
        for reason in dict.fromkeys(refused.values()):
            count = sum(each == reason for each in refused.values())
            name = f"{CapturedBlocks.title} ({count} of {len(self.paths)} blocks)"
            row = Rejected(name, f"cannot be captured: {reason}")
            if row not in self.rejected:
                self.rejected.append(row)
        left = tuple(path for path in paths if path not in refused)
        # Blocks that are refused run in the trace as they will without the lever.
        return replace(candidate, combination=base.combination.with_lever(CapturedBlocks(left))) if left else None

    def join_segments(self) -> None:
        """Join blocks to segments, which also recompute the blocks' outputs. That is slower, and needs less memory in
        models of many blocks.
        """
        if not self.request.may(Recompute) or not self.paths or self.least is None:
            return
        world = self.request.world
        if world is not None and world.parallel == "fsdp2" and world.reshard_after_forward is not False:
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
        """Keep the candidate if it is the fastest that fits, and record why the slower one is rejected."""
        if self.least is None or candidate.peak_bytes < self.least.peak_bytes:
            self.least = candidate
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

    def gap_seconds(self, candidate: Candidate) -> float:
        """Seconds by which another choice inside blocks may be faster than the best candidate. Zero if every choice was
        proved optimal, and for candidates other than the best, which claim nothing.
        """
        return max(0.0, candidate.seconds - self.lower_bound) if candidate is self.best else 0.0

    def reject_slower(self, name: str, candidate: Candidate) -> None:
        self.rejected.append(Rejected(name, "fits, but is slower", candidate.peak_bytes, candidate.seconds))

    def in_words(self, candidate: Candidate) -> str:
        return describe_levers(candidate.combination, candidate.policies, len(self.paths), len(candidate.joined))

    def forbidden(self) -> None:
        """Record which levers were not allowed, and which have nothing to work on in this model."""
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
        if least.needed_bytes <= self.budget_bytes:  # tensors fit the budget, so the device's memory is the limit
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
        """The user's own limit for offload, for the message; empty if there is none."""
        allowed = self.request.offload.budget_bytes
        if not self.request.may(Offload) or allowed is None:
            return ""
        return f"; offload may take {format_bytes(allowed)} (offload_budget)"


def segment_counts(blocks: int) -> list[int]:
    """The numbers of segments worth a trace, largest first.

    For each possible length of the longest segment, that is the smallest number of segments. More segments of the same
    greatest length would keep more outputs and lower no segment's own peak.
    """
    return sorted({math.ceil(blocks / length) for length in range(2, blocks + 1)}, reverse=True)
