"""The step of a recipe from two traces: forward and backward, which optimizers share, and an optimizer's own phase.

A `Search` whose tracer is a `PartTracer` traces and prices forward and backward once, for all optimizers. `WholeStep`
joins them to the phase of one optimizer, and solves the levers for the memory that its states leave.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tightfit.devices.families import Family, family_of
from tightfit.errors import LeverError
from tightfit.levers.recompute import RECOMPUTE_ALL, OperatorKey, Policy
from tightfit.levers.stream import streamable_weights
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import least_peak, solve
from tightfit.planner.levers import Combination, MicroBatches, Role, Stream, TiledModules
from tightfit.planner.request import Request, Tracer
from tightfit.planner.request import state_bytes as state_bytes_of
from tightfit.planner.search.bisection import Convex
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.least import LeastLevers, least_levers
from tightfit.planner.search.search import Search
from tightfit.recipes.batches import Shape, resized, shape_of
from tightfit.recipes.variants import held_bytes
from tightfit.tracing.cuda.replay import as_allocated
from tightfit.tracing.equal_blocks import traced_with_few
from tightfit.tracing.joined import joined, state_bytes
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.tracing.rules import Routing
from tightfit.tracing.step import trace_part, trace_update

Levers = tuple[Combination, dict[str, Policy]]
SOLVED_AGAIN = 4  # how often a choice whose trace is over the budget is solved again
LOGITS = 4  # tensors of the logits' size that a plain loss holds at once
IN_A_BLOCK = 4  # calls of attention in a block, at most
COUNTS = 4  # numbers of micro-batches that are tried, the fewest first


@dataclass
class FewBlocks:
    """The traces of a variant may be made with few of its equal blocks. Mutable: None until that was tried."""

    may: bool | None = None


@dataclass(frozen=True)
class PartTracer(Tracer):
    """Traces forward and backward without an optimizer's states, and nothing else: its whole step is this part.

    `frees` says that each gradient is used up at once. The first trace is made both with all blocks and with few of
    those that are equal. Where both are the same in every figure, the further ones are made with few (`equal_blocks`).
    """

    frees: bool = False
    equal: FewBlocks = field(default_factory=FewBlocks)

    def whole(
        self,
        combination: Combination,
        policies: Mapping[str, Policy],
        joined: Sequence[str] = (),
        routing: Routing = Routing.BALANCED,
    ) -> StepTrace:
        return self.stepped(self._traced(combination, policies, joined, routing))

    def stepped(self, part: StepTrace) -> StepTrace:
        """The trace of the whole step, which is the part itself."""
        return part

    def part(
        self,
        combination: Combination,
        policies: Mapping[str, Policy],
        plain: StepTrace,
        joined: Sequence[str] = (),
        *,
        compared: bool = False,
    ) -> StepTrace:
        return self._traced(combination, policies, joined, compared=compared, states=state_bytes_of(plain))

    def _traced(
        self,
        combination: Combination,
        policies: Mapping[str, Policy],
        joined: Sequence[str] = (),
        routing: Routing = Routing.BALANCED,
        *,
        compared: bool = False,
        states: int = 0,
    ) -> StepTrace:
        def all_blocks(combination: Combination, policies: Mapping[str, Policy]) -> StepTrace:
            request = self.request
            with self.applied(combination, policies, joined, compared):
                return trace_part(
                    request.model,
                    request.parts(combination.micro_batches),
                    request.loss,
                    settings=request.settings,
                    state_bytes=states,
                    with_gradient=list(trained(request)),
                    cost=request.cost,
                    executor=request.executor,
                    role=request.role,
                    in_backward=self.frees,
                    routing=routing,
                )

        stream = combination.get(Stream)
        streamed = frozenset(() if stream is None else stream.paths)

        def few_blocks(left: Callable[[str], bool]) -> StepTrace:
            fewer = None if stream is None else replace(stream, paths=tuple(filter(left, stream.paths)))
            inside = {path: policy for path, policy in policies.items() if left(path)}
            return all_blocks(combination.with_lever(fewer), inside)

        def levers_on(path: str) -> tuple[Policy | None, bool]:
            return policies.get(path), path in streamed

        may, found = self.equal.may is not False and not joined and combination.get(TiledModules) is None, None
        if may:
            # A stream brings weights two blocks before they are used, and begins and ends otherwise for as many.
            reach = 1 if stream is None else 2 * (1 + stream.ahead)
            found = traced_with_few(self.request.model, levers_on, few_blocks, reach)
        if found is not None and self.equal.may:
            return found
        trace = all_blocks(combination, policies)
        if may and self.equal.may is None:
            self.equal.may = found == trace
        return trace


@dataclass(frozen=True)
class JoinedTracer(PartTracer):
    """Traces a whole step as `WholeStep` has it: forward and backward, and the phase of an optimizer."""

    update: StepTrace | None = None

    def stepped(self, part: StepTrace) -> StepTrace:
        return with_update(part, self.update, on_cuda=self.request.role is not None)


def with_update(part: StepTrace, update: StepTrace | None, *, on_cuda: bool) -> StepTrace:
    """The trace of a whole step; without an update, of one whose optimizer runs on the host."""
    if update is not None:
        return joined(part, update, on_cuda=on_cuda)
    return as_allocated(part) if on_cuda else part


def trained(request: Request) -> dict[str, object]:
    """The parameters that a step trains: shapes and dtypes by name."""
    return {name: (p.shape, p.dtype) for name, p in request.model.named_parameters() if p.requires_grad}


def trace_update_of(shared: Search, optimizer: str, *, frees: bool) -> StepTrace:
    """The phase of the optimizer of this name after a shared part. Raises the errors of `build_optimizer`."""
    request = shared.request
    return trace_update(
        request.model,
        optimizer,
        settings=request.settings,
        with_gradient=shared.plain.with_gradient or list(trained(request)),
        cost=request.cost,
        role=request.role,
        one_by_one=frees,
    )


# Levers


def combinations_to_solve(search: Search) -> list[Combination]:
    """The combinations to solve, from the fastest to the one of least memory: with all levers that keep the step's
    count of micro-batches, then with more of those.
    """
    combinations = search.combinations()
    counts = sorted({c.micro_batches for c in combinations})
    fewest, more = counts[:1], counts[1:]
    stride = max(1, -(-len(more) // COUNTS))
    picked = [*fewest, *more[::-1][::stride][::-1]]
    # The last of a count has every other lever. A chunked loss costs next to no time, and leaves more to keep.
    return [[c for c in combinations if c.micro_batches == count][-1] for count in picked]


def frugal_levers(search: Search) -> Levers:
    """Levers of little memory: all of the first combination, and every block at its least."""
    policies = [kind.frugal_policy(search.request.levers) for kind in search.of_role(Role.INSIDE_BLOCKS)]
    return combinations_to_solve(search)[0], dict.fromkeys(search.paths, policies[-1]) if policies else {}


def keeping_attention(search: Search, frugal: Levers) -> Levers | None:
    """The frugal levers with attention kept in every block; None where the model has none, or more than recompute is
    allowed.
    """
    combination, policies = frugal
    if not policies or any(policy != RECOMPUTE_ALL for policy in policies.values()):
        return None
    names = {each.name for each in search.plain.operators if family_of(each.name) is Family.ATTENTION}
    kept = frozenset(OperatorKey(name, number) for name in names for number in range(IN_A_BLOCK))
    return (combination, dict.fromkeys(policies, Policy(kept))) if names else None


@dataclass(frozen=True)
class WholeStep:
    """A step with one optimizer: its shared forward and backward, and the trace of the optimizer's phase; None for one
    that runs on the host and leaves nothing on the device.

    `refused` is mutable: the peak of forward and backward in bytes of the smallest size that did not fit, by dimension.
    """

    shared: Search
    update: StepTrace | None
    frees: bool = False  # each gradient is used up at once
    refused: dict[str, int] = field(default_factory=dict)

    def candidate(
        self,
        combination: Combination,
        policies: dict[str, Policy],
        paths: tuple[str, ...] = (),
        priced: Priced | None = None,
        choice: tuple[int, ...] = (),
    ) -> Candidate:
        """The step with these levers, and the blocks at `paths` joined to the next ones."""
        part = self.shared.whole(combination, policies, paths)
        trace = with_update(part, self.update, on_cuda=self.shared.request.role is not None)
        return Candidate(combination, policies, paths, trace, priced, choice)

    @cached_property
    def plain(self) -> Candidate:
        """The step with no lever."""
        return self.candidate(self.shared.request.plain, {})

    @property
    def update_peak(self) -> int:
        """The highest level of the optimizer's phase, which no lever lowers; 0 with the step in backward."""
        return 0 if self.frees or self.update is None else self.plain.trace.phase_peaks()[Phase.OPTIMIZER]

    @property
    def beside(self) -> int:
        """Bytes beside the sums over the tensors of forward and backward: the optimizer's states, and what the
        allocator adds, as in the plain step.
        """
        states = 0 if self.update is None else state_bytes(self.update)
        sums = max(self.shared.plain.peak_bytes + states, self.update_peak)
        return states + max(0, self.plain.peak_bytes - sums)

    def solved_for(self, combination: Combination) -> tuple[Candidate | None, int]:
        """The fastest candidate that fits, None if none does; and the least bytes that this combination needs."""
        search = self.shared
        if combination not in search.priced and combination != search.request.plain and self._may_do(combination):
            found = self.candidate(combination, {})
            if search.excess(found) <= 0:
                return found, found.needed_bytes
        priced = search.baseline(combination).priced
        if priced is None:
            found = self.candidate(combination, {})
            return (found if search.excess(found) <= 0 else None), found.needed_bytes
        # What the allocator adds to the sums, as in the plain step; the trace as applied has the last word.
        beside = self.beside
        bound = search.budget_bytes - UNSEEN_BYTES - beside
        least = max(least_peak(priced.chain).peak_bytes + beside, self.update_peak) + UNSEEN_BYTES
        for _ in range(SOLVED_AGAIN):
            solution = solve(priced.chain, bound)
            if solution is None:
                break
            found = self.candidate(combination, priced.policies(solution.choice), (), priced, solution.choice)
            excess = search.excess(found)
            if excess <= 0:
                return found, found.needed_bytes
            bound = min(bound, solution.peak_bytes) - excess
        if least <= search.budget_bytes:
            # A lower bound is no lower excess where the allocator's segments are what is too large.
            choice = least_peak(priced.chain).choice
            found = self.candidate(combination, priced.policies(choice), (), priced, choice)
            if search.excess(found) <= 0:
                return found, found.needed_bytes
        return None, max(least, search.budget_bytes + 1)

    def _may_do(self, combination: Combination) -> bool:
        """True if the combination alone may be enough without recompute: pricing its blocks takes several traces."""
        # A chunked loss saves the logits, which are the largest tensors of forward, and a few tensors of their size.
        activations = (s.bytes for s in self.plain.trace.storages if s.category is Category.ACTIVATION)
        over, parts = self.shared.excess(self.plain), self.shared.request.micro_batches
        return over <= LOGITS * max(activations, default=0) or combination.micro_batches > parts

    def part_and_excess(self, shape: Shape, levers: Levers) -> tuple[StepTrace, int]:
        """With a batch of this shape: forward and backward, and by how many bytes the step is over the budget."""
        search = with_shape(self.shared, shape)
        return search.whole(*levers), search.excess(replace(self, shared=search).candidate(*levers))

    @property
    def stays_over(self) -> bool:
        """True if weights, gradients and states alone exceed the budget."""
        stays = max(self.update_peak, held_bytes(self.shared.request.model))
        return stays + UNSEEN_BYTES > self.shared.budget_bytes

    def at_last(self, levers: LeastLevers) -> Candidate | None:
        """The step with levers of least memory, which need not fit; None if they cannot be applied."""
        count = combinations_to_solve(self.shared)[-1].get(MicroBatches)
        combination = levers.combination.without(MicroBatches).with_lever(count)
        try:
            return self.candidate(combination, dict(levers.policies), levers.joined)
        except LeverError:  # a module that cannot be tiled
            return None


@dataclass
class SharedStep:
    """Forward and backward that recipes of one variant share. Mutable: what was found of it so far.

    `frees` says that each gradient is used up at once. `steps` are the whole steps by optimizer. `points` are the peaks
    with the frugal levers by size, for each dimension by its name and its present size. `stream` is among these levers.
    """

    search: Search
    frees: bool
    steps: dict[str, WholeStep] = field(default_factory=dict)
    points: dict[tuple[str, int], Convex] = field(default_factory=dict)
    recomputes: bool = False  # no kept attention lowers its peak
    stream: Stream | None = None

    def with_all_streamed(self, stream: Stream) -> "SharedStep":
        """The same step with every block streamed whose weights may go, in the way of this setting."""
        model = self.search.request.model
        weights = streamable_weights(model, self.search.paths, trained=stream.trained)
        paths = [path for path, found in zip(self.search.paths, weights, strict=True) if found]
        every = Stream.of(model, paths, stream.ahead, trained=stream.trained, folder=stream.folder)
        return SharedStep(self.search, self.frees, stream=every)

    @cached_property
    def least(self) -> LeastLevers:
        """The levers of about the least peak."""
        return least_levers(self.search, self.search.plain)[0]

    @cached_property
    def levers(self) -> tuple[Levers, Levers | None]:
        """Levers of little memory, and those that keep attention, where that is possible."""
        combination, policies = frugal_levers(self.search)
        frugal = combination.with_lever(self.stream), policies
        return frugal, keeping_attention(self.search, frugal)

    def part(self, shape: Shape) -> StepTrace:
        """Forward and backward with a batch of this shape and the frugal levers."""
        return with_shape(self.search, shape).whole(*self.levers[0])


def with_shape(search: Search, shape: Shape) -> Search:
    """The search with a batch of another shape, whose plain step is not traced."""
    batch = search.request.batch
    if shape == shape_of(batch):
        return search
    request = search.request.but(batch=resized(batch, *shape))
    tracer = replace(search.tracer, request=request)
    return Search(request, search.budget, tracer=tracer, known_paths=search.paths, limit_bytes=search.budget_bytes)
