"""The candidates of a search: traced as applied, compared with the budget, and kept if the fastest that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from tightfit.errors import CannotFit
from tightfit.levers.recompute import RECOMPUTE_ALL, Policy
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.levers import Combination, Lever, MicroBatches, Offload, PlainStep, Recompute, Role, lever_types
from tightfit.planner.records import DeviceRoom, Rejected
from tightfit.planner.request import Request, Tracer, lacking, plain_step
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate, describe_levers
from tightfit.runtime.forked import processes_for, shared_out
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.record import StepTrace
from tightfit.units import format_bytes, is_share_of, parse_budget

SMALL = 1500  # operators of a step that is traced in no time worth naming
Part = TypeVar("Part")
Result = TypeVar("Result")
Applied = tuple[Combination, frozenset[tuple[str, Policy]], tuple[str, ...]]  # levers, as a key


@dataclass
class Selection:
    """Mutable: the fastest candidate so far, the one of least peak, rejected combinations, and traces made."""

    request: Request
    budget: int | str
    best: Candidate | None = None
    least: Candidate | None = None
    solved: Candidate | None = None  # the fastest that fits without compiled or captured blocks
    mixed: Combination | None = None  # the one whose blocks were solved with compiled and captured options together
    rejected: list[Rejected] = field(default_factory=list)
    routing_matters: bool = False
    wholes: dict[Applied, StepTrace] = field(default_factory=dict)

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

    @cached_property
    def elsewhere(self) -> dict[str, Policy]:
        """The policies of blocks that run in other outcomes of random numbers than the one that is solved.

        They keep nothing. So where one stands in for a block of that outcome, it holds no more than that one.
        """
        if not self.plain.reads_draws or not self.request.may(Recompute):
            return {}
        traces = [replace(self.tracer, draws=each).whole(self.request.plain, {}) for each in self.request.outcomes]
        found = [find_blocks(self.request.model, self.request.blocks, trace) for trace in traces]
        return {path: RECOMPUTE_ALL for paths in found for path in paths if path not in self.paths}

    def paths_of(self, candidate: Candidate) -> list[str]:
        """The paths of the blocks that a candidate's plan decides about."""
        return [*self.paths, *(self.elsewhere if candidate.policies else ())]

    def step(self, plain: StepTrace | None = None) -> PlainStep:
        """The plain step as levers see it. `plain` replaces the search's own trace by another one of the same model,
        which saves a trace.
        """
        request = self.request
        trace = self.plain if plain is None else plain
        return plain_step(request, trace, self.paths)

    @cached_property
    def plain(self) -> StepTrace:
        """The step with no lever."""
        return self.tracer.whole(self.request.plain, {})

    @property
    def is_small(self) -> bool:
        """Whether a whole trace of the step costs next to nothing."""
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

    @cached_property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        plain = self.plain.peak_bytes
        budget = parse_budget(self.budget, device_bytes=self.request.device.memory_bytes, plain_peak_bytes=plain)
        # Every plan leaves `UNSEEN_BYTES` free. Without them on top, a budget of `1x`, or of the peak that `estimate`
        # printed, would reject the plain step itself.
        is_plain = budget == plain or (is_share_of(self.budget, "x") and budget > plain)
        return max(budget, plain + UNSEEN_BYTES) if is_plain else budget

    def trace_applied(
        self,
        combination: Combination,
        policies: dict[str, Policy],
        priced: Priced | None = None,
        choice: tuple[int, ...] = (),
        joined: tuple[str, ...] = (),
    ) -> Candidate:
        policies = {**self.elsewhere, **policies} if policies else policies
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

    def reject_slower(self, name: str, candidate: Candidate) -> None:
        self.rejected.append(Rejected(name, "fits, but is slower", candidate.peak_bytes, candidate.seconds))

    def in_words(self, candidate: Candidate) -> str:
        return describe_levers(candidate.combination, candidate.policies, len(self.paths), len(candidate.joined))

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
            f"by {format_bytes(holds[1])} of {holds[0]}{self.offload_bound()}{self.no_micro_batches()}",
            least.needed_bytes,
            taken,
        )

    def no_micro_batches(self) -> str:
        """Why the batch may not be split, for the message; empty if it may, or if nobody allowed it."""
        refusal = self.request.separation.refusal if self.request.may(MicroBatches) else None
        return "" if refusal is None else f"; {MicroBatches.title} is left out: {refusal}"

    def offload_bound(self) -> str:
        """The user's own limit for offload, for the message; empty if there is none."""
        allowed = self.request.offload.budget_bytes
        if not self.request.may(Offload) or allowed is None:
            return ""
        return f"; offload may take {format_bytes(allowed)} (offload_budget)"
