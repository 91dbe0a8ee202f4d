"""The longest sequence and the largest batch of each rank that a recipe trains on several cards within a budget.

A size is looked for with whole played steps alone. A trace of forward and backward would be half the time, but FSDP2
reserves less in a step that others have preceded, so it is no bound. Bytes over tokens are nearly a line, and the other
dimension and other numbers of cards have about the same one at another height: those lines say where to look.
"""

from dataclasses import dataclass, field, replace

from tightfit.levers.recompute import Policy
from tightfit.planner.levers import Combination, Role
from tightfit.planner.request import Request
from tightfit.planner.search.bisection import Line, Measured, near_bound
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.of_ranks import RanksFound
from tightfit.planner.search.search import Search
from tightfit.ranks.world import Sharding, World
from tightfit.recipes.records import Largest
from tightfit.recipes.sizes import Dimension, dimensions_of, resized


@dataclass(frozen=True)
class RankStep:
    """The step of a row that fits, with the levers of little memory, for batches of any size.

    `request` is of the units of the row's plan, which free gathered weights. `held_bytes` are a rank's weights,
    gradients and states, by arithmetic, and `over_now` what the row's plan takes over the budget, below zero: what it
    leaves.
    """

    request: Request
    budget: int | str
    budget_bytes: int
    world: World
    paths: list[str]
    combination: Combination
    policies: dict[str, Policy]
    routing_matters: bool
    held_bytes: int
    over_now: int

    @classmethod
    def of(cls, found: RanksFound, request: Request, budget: int | str, held_bytes: int) -> "RankStep":
        search = found.search
        kept = found.world.sharding
        world = replace(found.world, sharding=Sharding(apart=kept.apart, on_host=kept.on_host))
        combinations = search.combinations()
        count = combinations[0].micro_batches
        inside = [kind.frugal_policy(request.levers) for kind in search.of_role(Role.INSIDE_BLOCKS)]
        return cls(
            request=request.but(world=world),
            budget=budget,
            budget_bytes=found.budget_bytes,
            world=world,
            paths=search.paths,
            combination=[each for each in combinations if each.micro_batches == count][-1],
            policies=dict.fromkeys(search.paths, inside[-1]) if inside else {},
            routing_matters=search.routing_matters,
            held_bytes=held_bytes,
            over_now=found.candidate.needed_bytes - found.budget_bytes,
        )

    def played(self, size: int, length: int) -> Measured:
        """The bytes by which the largest rank exceeds the budget with such a batch, and whether its card has room."""
        batch = resized(self.request.batch, size, length)
        assert batch is not None, "a batch of token ids"
        search = Search(  # without a trace of the plain step
            self.request.but(batch=batch),
            self.budget,
            known_paths=self.paths,
            limit_bytes=self.budget_bytes,
            routing_matters=self.routing_matters,
        )
        step = search.trace_applied(self.combination, self.policies)
        ranks = search.tracer.ranks(self.world, self.combination, self.policies, first=step.trace)
        over = max(step.needed_bytes, max(ranks.peaks) + UNSEEN_BYTES) - self.budget_bytes
        return Measured(over, over <= 0 and search.excess(step) <= 0)


@dataclass
class SizesOfRanks:
    """Mutable: what steps of a recipe were found to take with one engine, for other sizes and numbers of cards.

    `beside` has the bytes beside a rank's weights, gradients and states, over the budget, by tokens. `level` is how
    far over the budget a step may be, mostly below zero: what the allocator reserves reaches the card's end before.
    """

    beside: dict[int, int] = field(default_factory=dict)
    level: int = 0

    def of(self, step: RankStep) -> tuple[Largest | None, Largest | None]:
        """The longest sequence and the largest batch of a rank; None where the batch is not of token ids alone."""
        request = step.request
        found = dimensions_of(request.model, request.batch, request.micro_batches)
        return (None, None) if found is None else (self._largest(step, found[0]), self._largest(step, found[1]))

    def _largest(self, step: RankStep, dimension: Dimension) -> Largest:
        unit = dimension.multiple_of
        size, length = dimension.shape(unit)
        tokens = size * length
        now, top = dimension.now // unit, dimension.most // unit
        guide = Line({n / tokens: bytes_ + step.held_bytes for n, bytes_ in self.beside.items()}, self.level)
        found, line = near_bound(
            lambda number: step.played(*dimension.shape(number * unit)), now, step.over_now, top, guide
        )
        self.beside |= {number * tokens: over - step.held_bytes for number, over in line.points.items()}
        self.level = line.level
        # What fits was played whole: this size, or the present one within the row's plan.
        return Largest(max(found * unit, dimension.now), confirmed=True)
