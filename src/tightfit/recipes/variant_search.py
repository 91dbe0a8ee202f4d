"""Traces and prices one variant of a model without an optimizer, for all optimizers that train it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tightfit.devices.families import Family, family_of
from tightfit.errors import LeverError
from tightfit.levers.recompute import RECOMPUTE_ALL, OperatorKey, Policy
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Solution, least_peak, solve
from tightfit.planner.levers import Combination, MicroBatches, Role
from tightfit.planner.request import Tracer
from tightfit.planner.search.candidates import UNSEEN_BYTES, Baseline, Candidate
from tightfit.planner.search.least import Way, least_way
from tightfit.planner.search.search import Search
from tightfit.recipes.variants import held_bytes
from tightfit.step import Batch
from tightfit.tracing.joined import joined, state_bytes
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.tracing.step import trace_part, trace_update
from tightfit.units import parse_budget

Choice = tuple[int, ...]
SOLVED_AGAIN = 4  # how often a choice whose trace is over the budget is solved again
LOGITS = 4  # tensors of the logits' size that a plain loss holds at once
IN_A_BLOCK = 4  # calls of attention in a block, at most
COUNTS = 4  # numbers of micro-batches that are tried, the fewest first


@dataclass(frozen=True)
class PartTracer(Tracer):
    """Traces forward and backward without an optimizer's states. `frees` says that each gradient is used up at once."""

    frees: bool = False

    @property
    def trained(self) -> list[str]:
        return [name for name, p in self.request.model.named_parameters() if p.requires_grad]

    def part(
        self,
        combination: Combination,
        policies: Mapping[str, Policy],
        plain: StepTrace | None = None,
        joined: Sequence[str] = (),
        *,
        compared: bool = False,
    ) -> StepTrace:
        request = self.request
        with self.applied(combination, policies, joined, compared):
            return trace_part(
                request.model,
                request.parts(combination.micro_batches),
                request.loss,
                settings=request.settings,
                state_bytes=0,
                with_gradient=self.trained,
                cost=request.cost,
                executor=request.executor,
                role=request.role,
                in_backward=self.frees,
            )


@dataclass
class VariantSearch(Search):
    """The search of a plan for any optimizer of a variant. Mutable: traces made so far, which optimizers share."""

    tracer: PartTracer = None  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride] - of this class
    frees: bool = False
    known_frugal: tuple[Combination, dict[str, Policy]] | None = None
    known_attention: frozenset[str] | None = None  # the operators of attention
    parts: dict[tuple, StepTrace] = field(default_factory=dict)
    plains: dict[int, Candidate] = field(default_factory=dict)  # by the trace of the optimizer, which stays alive
    updates: dict[tuple, StepTrace] = field(default_factory=dict)  # variants that train the same share them

    def __post_init__(self) -> None:
        self.tracer = PartTracer(self.request, frees=self.frees)
        super().__post_init__()
        if self.limit_bytes is None:
            # It is no share of the plain peak, so a variant that arithmetic excludes has no trace.
            self.limit_bytes = parse_budget(self.budget, device_bytes=self.request.device.memory_bytes)

    @property
    def plain(self) -> StepTrace:
        """Forward and backward with no lever."""
        return self.applied_part(self.request.plain, {})

    def applied_part(
        self, combination: Combination, policies: Mapping[str, Policy], joined: Sequence[str] = ()
    ) -> StepTrace:
        """Forward and backward with these levers, traced once."""
        key = (combination, frozenset(policies.items()), tuple(joined))
        if key not in self.parts:
            self.parts[key] = self.tracer.part(combination, policies, None, joined)
        return self.parts[key]

    @property
    def on_cuda(self) -> bool:
        return self.request.role is not None

    def update(self, name: str) -> StepTrace:
        """The phase of the optimizer of this name. Raises the errors of `build_optimizer`."""
        request = self.request
        key = (
            name,
            self.frees,
            tuple((n, p.shape, p.dtype) for n, p in request.model.named_parameters() if p.requires_grad),
        )
        if key not in self.updates:
            self.updates[key] = trace_update(
                request.model,
                name,
                settings=request.settings,
                with_gradient=self.plain.with_gradient or PartTracer(request).trained,
                cost=request.cost,
                role=request.role,
                one_by_one=self.frees,
            )
        return self.updates[key]

    # Candidates for one optimizer

    def candidate(
        self,
        update: StepTrace,
        combination: Combination,
        policies: dict[str, Policy],
        joined_paths: tuple[str, ...] = (),
        base: Baseline | None = None,
        choice: tuple[int, ...] = (),
    ) -> Candidate:
        part = self.applied_part(combination, policies, joined_paths)
        trace = joined(part, update, on_cuda=self.on_cuda)
        return Candidate(combination, policies, joined_paths, trace, None if base is None else base.priced, choice)

    def plain_candidate(self, update: StepTrace) -> Candidate:
        if id(update) not in self.plains:
            self.plains[id(update)] = self.candidate(update, self.request.plain, {})
        return self.plains[id(update)]

    def rungs(self) -> list[Combination]:
        """The combinations to solve, from the fastest to the one of least memory: with all levers that keep the step's
        count of micro-batches, then with more of those.
        """
        combinations = self.combinations()
        counts = sorted({c.micro_batches for c in combinations})
        fewest, more = counts[:1], counts[1:]
        stride = max(1, -(-len(more) // COUNTS))
        picked = [*fewest, *more[::-1][::stride][::-1]]
        # The last of a count has every other lever. A chunked loss costs next to no time, and leaves more to keep.
        return [[c for c in combinations if c.micro_batches == count][-1] for count in picked]

    def solved_for(self, update: StepTrace, rung: Combination, plain: Candidate) -> tuple[Candidate | None, int]:
        """The fastest candidate of a rung that fits, None if none does; and the least bytes that the rung needs."""
        states = state_bytes(update)
        if rung not in self.priced and rung != self.request.plain and self.may_do(rung, plain):
            found = self.candidate(update, rung, {})
            if self.excess(found) <= 0:
                return found, found.needed_bytes
        base = self.rung_baseline(rung)
        # What the allocator adds to the sums, as in the plain step; the trace as applied has the last word.
        above = self.added_by_allocator(update)
        if base.priced is None:
            found = self.candidate(update, rung, {})
            return (found if self.excess(found) <= 0 else None), found.needed_bytes
        chain = base.chain
        bound = self.budget_bytes - UNSEEN_BYTES - states - above
        least = max(least_peak(chain).peak_bytes + states + above, self.update_peak(plain)) + UNSEEN_BYTES
        for _ in range(SOLVED_AGAIN):
            solution: Solution | None = solve(chain, bound)
            if solution is None:
                break
            policies = base.priced.policies(solution.choice)
            found = self.candidate(update, rung, policies, base=base, choice=solution.choice)
            excess = self.excess(found)
            if excess <= 0:
                return found, found.needed_bytes
            bound = min(bound, solution.peak_bytes) - excess
        if least <= self.budget_bytes:
            # A lower bound is no lower excess where the allocator's segments are what is too large.
            choice = least_peak(chain).choice
            found = self.candidate(update, rung, base.priced.policies(choice), base=base, choice=choice)
            if self.excess(found) <= 0:
                return found, found.needed_bytes
        return None, max(least, self.budget_bytes + 1)

    def may_do(self, rung: Combination, plain: Candidate) -> bool:
        """True if a rung's levers may be enough without recompute: pricing its blocks takes several traces."""
        # A chunked loss saves the logits, which are the largest tensors of forward, and a few tensors of their size.
        largest = max((s.bytes for s in plain.trace.storages if s.category is Category.ACTIVATION), default=0)
        return self.excess(plain) <= LOGITS * largest or rung.micro_batches > self.request.micro_batches

    @property
    def frugal(self) -> tuple[Combination, dict[str, Policy]]:
        """Levers of little memory: all of the first rung, and every block at its least."""
        if self.known_frugal is None:
            self.known_frugal = self._frugal()
        return self.known_frugal

    def _frugal(self) -> tuple[Combination, dict[str, Policy]]:
        inside = self.of_role(Role.INSIDE_BLOCKS)
        policies = [kind.frugal_policy(self.request.levers) for kind in inside]
        return self.rungs()[0], dict.fromkeys(self.paths, policies[-1]) if policies else {}

    @property
    def attention(self) -> frozenset[str]:
        """The names of the operators of attention."""
        if self.known_attention is None:
            names = (each.name for each in self.plain.operators)
            self.known_attention = frozenset(name for name in names if family_of(name) is Family.ATTENTION)
        return self.known_attention

    @property
    def keeping_attention(self) -> tuple[Combination, dict[str, Policy]] | None:
        """The frugal levers with attention kept in every block; None where the model has none, or more than recompute
        is allowed.
        """
        combination, policies = self.frugal
        if not policies or any(policy != RECOMPUTE_ALL for policy in policies.values()):
            return None
        kept = frozenset(OperatorKey(name, number) for name in self.attention for number in range(IN_A_BLOCK))
        return (combination, dict.fromkeys(policies, Policy(kept))) if self.attention else None

    def part_keeping_attention(self) -> int | None:
        """The peak in bytes of forward and backward with attention kept; None where that is not possible."""
        return None if self.keeping_attention is None else self.applied_part(*self.keeping_attention).peak_bytes

    def with_batch(self, batch: Batch) -> "VariantSearch":
        """The search of the same variant with another batch, whose plain step is not traced."""
        if batch is self.request.batch:
            return self
        other = VariantSearch(
            self.request.but(batch=batch),
            self.budget,
            frees=self.frees,
            updates=self.updates,
            known_paths=self.paths,
            limit_bytes=self.limit_bytes,
            known_frugal=self.frugal,
            known_attention=self.attention,
        )
        return other

    def added_by_allocator(self, update: StepTrace) -> int:
        """Bytes that the allocator adds to the sums over tensors, as in the plain step."""
        plain = self.plain_candidate(update)
        return max(0, plain.peak_bytes - max(self.plain.peak_bytes + state_bytes(update), self.update_peak(plain)))

    def update_peak(self, candidate: Candidate) -> int:
        """The highest level of the optimizer's phase, which no lever lowers; 0 with the step in backward."""
        return 0 if self.frees else candidate.trace.phase_peaks()[Phase.OPTIMIZER]

    def rung_baseline(self, rung: Combination) -> Baseline:
        if rung not in self.priced:
            self.baseline(rung, self.part(rung))
        return self.priced[rung]

    @cached_property
    def way(self) -> tuple[Way, int]:
        """The levers of about the least peak, and that peak without states."""
        return least_way(self, self.plain)

    def choice_within(self, rung: Combination, bound: int) -> tuple[dict[str, Policy], Priced | None, Choice] | None:
        """The fastest policies of a rung whose peak, without an optimizer, is within the bound; None if none is."""
        base = self.rung_baseline(rung)
        if base.priced is None:
            return ({}, None, ()) if base.peak_bytes <= bound else None
        solution = solve(base.chain, bound)
        return None if solution is None else (base.priced.policies(solution.choice), base.priced, solution.choice)

    def least_choice(self, rung: Combination) -> tuple[dict[str, Policy], Priced | None, Choice]:
        """The policies of a rung's least peak."""
        base = self.rung_baseline(rung)
        if base.priced is None:
            return {}, None, ()
        choice = least_peak(base.chain).choice
        return base.priced.policies(choice), base.priced, choice

    def least_of(self, rung: Combination) -> int:
        """The least peak of a rung without an optimizer."""
        base = self.rung_baseline(rung)
        return base.peak_bytes if base.priced is None else least_peak(base.chain).peak_bytes

    def last_resort(self, update: StepTrace) -> Candidate | None:
        """The candidate of least memory, which need not fit; None if its levers cannot be applied.

        Where weights, gradients and states alone exceed the budget, it has the frugal levers: no search for better ones
        would find what fits.
        """
        stays = max(self.update_peak(self.plain_candidate(update)), held_bytes(self.request.model))
        if stays + UNSEEN_BYTES > self.budget_bytes:
            combination, policies, joined_paths = *self.frugal, ()
        else:
            way, _ = self.way
            combination, policies, joined_paths = way.combination, dict(way.policies), way.joined
        count = self.rungs()[-1].get(MicroBatches)
        combination = combination.without(MicroBatches).with_lever(count)
        try:
            return self.candidate(update, combination, policies, joined_paths)
        except LeverError:  # a module that cannot be tiled
            return None
