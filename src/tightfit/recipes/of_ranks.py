"""Training on several cards: a plan for all ranks, for each recipe, engine and number of cards.

Whole steps of a played rank are planned, one by one: what recipes of one process share (a forward and backward without
an optimizer) is not what ranks share, whose shards and buckets are part of both. Last resorts are not tried: they take
many traces of large models that do not fit. Rows of one recipe and engine come from one process, since what their sizes
take is alike on any number of cards; others share nothing, so forks of this process take some of them.

A size is looked for with whole played steps alone. A trace of forward and backward would be half the time, but FSDP2
reserves less in a step that others have preceded, so it is no bound. Bytes over tokens are nearly a line, and the other
dimension and other numbers of cards have about the same one at another height: those lines say where to look.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightfit.errors import CannotFit, InputError
from tightfit.planner.api import plan_of_ranks
from tightfit.planner.request import Request
from tightfit.planner.search.bisection import Line, Measured, near_bound
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.of_ranks import RanksFound, search_ranks
from tightfit.planner.search.search import Search
from tightfit.ranks.world import Sharding, World
from tightfit.recipes.batches import Dimension, dimensions_of, resized, token_count
from tightfit.recipes.choices import Wanted, adapter_recipes, half_of, installed, least_bytes_of_rank
from tightfit.recipes.leaving_out import LeftOut, leaving_out
from tightfit.recipes.ranking import ranked
from tightfit.recipes.records import FEW_BITS, LargestSize, Outcome, Recipe
from tightfit.recipes.search import budget_of_recipes
from tightfit.recipes.variants import Models, OptimizerOf, with_recipe
from tightfit.recipes.whole_step import Levers, frugal_levers
from tightfit.runtime.forked import Notice, processes_for, shared_out

ENGINES = ("ddp", "fsdp2")  # ranks of the others read one batch, so their rows would compare other steps
SIZES = (2, 4, 8)  # numbers of cards with rows of their own, up to the number that was asked for
OPTIMIZER = "adamw_fused"  # where none is named: most others do not run on shards, or change the result

_Answer = tuple[list[Outcome], list[LeftOut]]


def outcomes_of_ranks(
    asked: Request,
    world: World,
    budget: int | str,
    recipes: Sequence[Recipe],
    *,
    optimizer: OptimizerOf,
    notice: Notice,
    processes: int = 1,
) -> tuple[list[Outcome], list[LeftOut]]:
    """The outcomes of recipes, those of the most cards first; what does not fit stands at the end. And what was left
    out.
    """
    if world.parallel not in ENGINES:
        raise InputError(f"parallel={world.parallel!r} has no rows in fit: ask `plan` or `estimate`, or leave it out")
    models, budget_bytes = Models(asked.model), budget_of_recipes(asked, budget)

    def searched(part: tuple[Recipe, str], notice: Notice) -> _Answer:
        """The rows of one recipe with one engine, on each number of cards, and why some were left out."""
        recipe, engine = part
        found: list[Outcome] = []
        left_out: list[LeftOut] = []
        steps: dict[int, RankStep | None] = {}
        for size in sizes_of(world):
            own = replace(world, size=size, parallel=engine)
            with leaving_out([recipe], left_out, f"{size} cards, {engine}, "):
                request = with_recipe(asked, recipe, models.of(recipe), optimizer)
                outcome, steps[size] = _outcome(recipe, own, request, budget, budget_bytes)
                notice(f"{outcome.name}: {'fits' if outcome.fits else 'does not fit'}")
                found.append(outcome)
        line = Line()
        for number, outcome in enumerate(found):
            if (step := steps[outcome.world_size]) is not None:
                with leaving_out([outcome], left_out, "the largest sizes of "):
                    (longest, largest), line = largest_sizes(step, line)
                    found[number] = replace(outcome, longest_sequence=longest, largest_batch=largest)
                    notice(f"{outcome.name}: sequences of {longest} tokens")
        return found, left_out

    def searched_apart(part: tuple[Recipe, str], notice: Notice) -> _Answer:
        outcomes, left_out = searched(part, notice)
        return [replace(outcome, plan=None) for outcome in outcomes], left_out  # a plan holds its model

    engines = ENGINES if asked.step.parallel is None else (asked.step.parallel,)
    parts = [(recipe, engine) for recipe in recipes for engine in engines]
    sharing = min(processes, processes_for(len(parts)))
    answers = shared_out(searched if sharing == 1 else searched_apart, parts, notice, sharing)
    every = [outcome for outcomes, _ in answers for outcome in outcomes]
    rows: list[Outcome] = []
    for size in sizes_of(world):
        rows += ranked([outcome for outcome in every if outcome.world_size == size])
    return sorted(rows, key=lambda row: not row.fits), [each for _, left_out in answers for each in left_out]


def _outcome(
    recipe: Recipe, world: World, asked: Request, budget: int | str, budget_bytes: int
) -> tuple[Outcome, "RankStep | None"]:
    """The outcome of a recipe, and the step whose sizes can be found, where it fits."""
    outcome = Outcome(recipe, False, 0, 0, world_size=world.size, parallel=world.parallel, nodes=world.nodes)
    least = least_bytes_of_rank(recipe, asked.step.model, world)
    if least > budget_bytes - UNSEEN_BYTES:  # by arithmetic, so nothing of it is traced
        if world.parallel != "fsdp2" or asked.device.kind == "cpu":
            return replace(outcome, peak_bytes=least, needed_bytes=least + UNSEEN_BYTES), None
        world, least = replace(world, sharding=Sharding(on_host=True)), 0
    asked = asked.but(world_size=world.size, nodes=world.nodes, parallel=world.parallel)
    request = asked.checked(may_choose=True).but(world=world)
    try:
        found = search_ranks(request, world, budget, resorts=False)
    except CannotFit as error:
        # Where the bytes fit and the device has no room, with what the allocator reserves, what it takes there.
        needed = max(error.least_bytes, error.taken_bytes or 0, budget_bytes + 1)
        return replace(outcome, peak_bytes=error.least_bytes, needed_bytes=needed), None
    step = RankStep.of(found, request, budget, least)
    plan = plan_of_ranks(found)
    outcome = replace(
        outcome.as_planned(plan, token_count(asked.batch)),
        needed_bytes=max(plan.rank_peak_bytes) + UNSEEN_BYTES,
        rank_peak_bytes=plan.rank_peak_bytes,
        communicator_bytes=plan.communicator_bytes,
        host_bytes=plan.host_bytes,
    )
    return outcome, step


def sizes_of(world: World) -> list[int]:
    """The numbers of cards with rows, the most first. Over several nodes, the one that was asked for alone."""
    fewer = [size for size in SIZES if size < world.size] if world.nodes == 1 else []
    return [world.size, *reversed(fewer)]


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
    levers: Levers
    routing_matters: bool
    held_bytes: int
    over_now: int

    @classmethod
    def of(cls, found: RanksFound, request: Request, budget: int | str, held_bytes: int) -> "RankStep":
        search = found.search
        kept = found.world.sharding
        world = replace(found.world, sharding=Sharding(apart=kept.apart, on_host=kept.on_host))
        return cls(
            request=request.but(world=world),
            budget=budget,
            budget_bytes=found.budget_bytes,
            world=world,
            paths=search.paths,
            levers=frugal_levers(search),
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
        step = search.trace_applied(*self.levers)
        ranks = search.tracer.ranks(self.world, *self.levers, first=step.trace)
        over = max(step.needed_bytes, max(ranks.peaks) + UNSEEN_BYTES) - self.budget_bytes
        return Measured(over, over <= 0 and search.excess(step) <= 0)


def largest_sizes(step: RankStep, beside: Line) -> tuple[tuple[LargestSize | None, LargestSize | None], Line]:
    """The longest sequence and the largest batch of a rank; None where the batch is not of token ids alone.

    `beside` is what steps of the recipe were found to take with the engine, for other sizes and numbers of cards: bytes
    beside a rank's weights, gradients and states, over the budget, by tokens. Its level is how far over the budget a
    step may be, mostly below zero: what the allocator reserves reaches the card's end before. It comes back with what
    this rank's steps were found to take.
    """
    request = step.request
    dimensions = dimensions_of(request.model, request.batch, request.micro_batches)
    if dimensions is None:
        return (None, None), beside
    longest, beside = _largest(step, dimensions[0], beside)
    largest, beside = _largest(step, dimensions[1], beside)
    return (longest, largest), beside


def _largest(step: RankStep, dimension: Dimension, beside: Line) -> tuple[LargestSize, Line]:
    unit = dimension.multiple_of
    size, length = dimension.shape(unit)
    tokens = size * length
    now, top = dimension.now // unit, dimension.most // unit
    guide = Line({n / tokens: bytes_ + step.held_bytes for n, bytes_ in beside.points.items()}, beside.level)
    found, line = near_bound(
        lambda number: step.played(*dimension.shape(number * unit)), now, step.over_now, top, guide
    )
    points = {number * tokens: over - step.held_bytes for number, over in line.points.items()}
    # What fits was played whole: this size, or the present one within the row's plan.
    largest = LargestSize(max(found * unit, dimension.now), confirmed=True)
    return largest, Line({**beside.points, **points}, line.level)


def recipes_of_ranks(asked: Request, wanted: Wanted, *, may_adapt: bool) -> list[Recipe]:
    """The recipes that are tried on several cards: all weights, in each dtype, and adapters on whole weights. Raises
    `InputError`.
    """
    if wanted.base in FEW_BITS:
        raise InputError(
            f"base {wanted.base} and world_size are both given, and ranks share whole weights only: take bf16 or fp32"
        )
    if wanted.step_in_backward:
        raise InputError(
            "step_in_backward and world_size are both given, and gradients of several ranks are averaged before the "
            "step: leave one out"
        )
    half = half_of(asked.device)
    optimizer = wanted.optimizer or OPTIMIZER
    usual = "fp32" if asked.device.kind == "cpu" else half
    found = []
    if wanted.trains != "adapters":
        if wanted.dtype in (None, "fp32"):
            found.append(Recipe("fp32", optimizer=optimizer, precision=wanted.precision or usual))
        if wanted.dtype == "bf16" or (wanted.dtype is None and half == "bf16"):
            found.append(Recipe("bf16", optimizer=optimizer, precision=wanted.precision or "fp32"))
    if may_adapt and wanted.trains != "all":
        adapted = installed(adapter_recipes(asked.device, wanted))
        found += [recipe for recipe in adapted if recipe.adapter is not None and recipe.adapter.base not in FEW_BITS]
    return found
