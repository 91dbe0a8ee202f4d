"""Training on several cards: a plan for all ranks, for each recipe, engine and number of cards.

Whole steps of a played rank are planned, one by one: what recipes of one process share (a forward and backward without
an optimizer) is not what ranks share, whose shards and buckets are part of both. Last resorts are not tried: they take
many traces of large models that do not fit. Rows of one recipe and engine come from one process, since what their sizes
take is alike on any number of cards; others share nothing, so forks of this process take some of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tightfit.errors import BudgetError, CannotFit, InputError
from tightfit.planner.api import plan_of_ranks
from tightfit.planner.levers import Exactness
from tightfit.planner.plans import Plan
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.of_ranks import search_ranks
from tightfit.ranks.world import Sharding, World
from tightfit.recipes.choices import Wanted, adapter_recipes, half_of, installed, least_bytes_of_rank
from tightfit.recipes.leaving_out import LeftOut, leaving_out
from tightfit.recipes.ranking import ranked
from tightfit.recipes.records import FEW_BITS, Outcome, Recipe
from tightfit.recipes.search import token_count
from tightfit.recipes.sizes_of_ranks import RankStep, SizesOfRanks
from tightfit.recipes.variants import Models, OptimizerOf, with_recipe
from tightfit.runtime.forked import Notice, processes_for, shared_out
from tightfit.units import is_share_of, parse_budget

ENGINES = ("ddp", "fsdp2")  # ranks of the others read one batch, so their rows would compare other steps
SIZES = (2, 4, 8)  # numbers of cards with rows of their own, up to the number that was asked for
OPTIMIZER = "adamw_fused"  # where none is named: most others do not run on shards, or change the result

_Answer = tuple[list[Outcome], list[LeftOut]]


@dataclass
class RanksSearch:
    """Mutable: the models built so far, and what was left out."""

    asked: Request
    world: World
    budget: int | str
    optimizer: OptimizerOf
    notice: Notice
    processes: int = 1
    left_out: list[LeftOut] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.world.parallel not in ENGINES:
            raise InputError(
                f"parallel={self.world.parallel!r} has no rows in fit: ask `plan` or `estimate`, or leave it out"
            )
        if is_share_of(self.budget, "x"):
            raise BudgetError(f"budget {self.budget!r} is a share of one recipe's plain peak: give bytes, or 80%")
        self.models = Models(self.asked.model)
        self.budget_bytes = parse_budget(self.budget, device_bytes=self.asked.device.memory_bytes, plain_peak_bytes=0)

    def run(self, recipes: Sequence[Recipe]) -> list[Outcome]:
        """The outcomes, those of the most cards first; what does not fit stands at the end."""
        engines = ENGINES if self.asked.step.parallel is None else (self.asked.step.parallel,)
        parts = [(recipe, engine) for recipe in recipes for engine in engines]
        sharing = min(self.processes, processes_for(len(parts)))
        answers = shared_out(self._searched if sharing == 1 else self._searched_apart, parts, self.notice, sharing)
        self.left_out = [each for _, left_out in answers for each in left_out]
        every = [outcome for outcomes, _ in answers for outcome in outcomes]
        found: list[Outcome] = []
        for size in sizes_of(self.world):
            found += ranked([outcome for outcome in every if outcome.world_size == size])
        return sorted(found, key=lambda outcome: not outcome.fits)

    def _searched_apart(self, part: tuple[Recipe, str], notice: Notice) -> _Answer:
        outcomes, left_out = self._searched(part, notice)
        return [replace(outcome, plan=None) for outcome in outcomes], left_out  # a plan holds its model

    def _searched(self, part: tuple[Recipe, str], notice: Notice) -> _Answer:
        """The rows of one recipe with one engine, on each number of cards, and why some were left out."""
        recipe, engine = part
        found: list[Outcome] = []
        left_out: list[LeftOut] = []
        steps: dict[int, RankStep | None] = {}
        for size in sizes_of(self.world):
            world = replace(self.world, size=size, parallel=engine)
            with leaving_out([recipe], left_out, f"{size} cards, {engine}, "):
                outcome, steps[size] = self.of_recipe(recipe, world)
                notice(f"{outcome.name}: {'fits' if outcome.fits else 'does not fit'}")
                found.append(outcome)
        sizes = SizesOfRanks()
        for number, outcome in enumerate(found):
            if (step := steps[outcome.world_size]) is not None:
                with leaving_out([outcome], left_out, "the largest sizes of "):
                    longest, largest = sizes.of(step)
                    found[number] = replace(outcome, longest_sequence=longest, largest_batch=largest)
                    notice(f"{outcome.name}: sequences of {longest} tokens")
        return found, left_out

    def of_recipe(self, recipe: Recipe, world: World) -> tuple[Outcome, RankStep | None]:
        """The outcome of a recipe, and the step whose sizes can be found, where it fits."""
        model = self.models.of(recipe)
        outcome = Outcome(recipe, False, 0, 0, world_size=world.size, parallel=world.parallel, nodes=world.nodes)
        least = least_bytes_of_rank(recipe, model, world)
        if least > self.budget_bytes - UNSEEN_BYTES:  # by arithmetic, so nothing of it is traced
            if world.parallel != "fsdp2" or self.asked.device.kind == "cpu":
                return replace(outcome, peak_bytes=least, needed_bytes=least + UNSEEN_BYTES), None
            world, least = replace(world, sharding=Sharding(on_host=True)), 0
        asked = with_recipe(self.asked, recipe, model, self.optimizer)
        asked = asked.but(world_size=world.size, nodes=world.nodes, parallel=world.parallel)
        request = asked.checked(may_choose=True).but(world=world)
        try:
            found = search_ranks(request, world, self.budget, resorts=False)
        except CannotFit as error:
            # Where the bytes fit and the device has no room, with what the allocator reserves, what it takes there.
            needed = max(error.least_bytes, error.taken_bytes or 0, self.budget_bytes + 1)
            return replace(outcome, peak_bytes=error.least_bytes, needed_bytes=needed), None
        step = RankStep.of(found, request, self.budget, least)
        return self.planned(outcome, plan_of_ranks(found)), step

    def planned(self, outcome: Outcome, plan: Plan) -> Outcome:
        tokens, seconds = token_count(self.asked.batch), plan.step_seconds
        return replace(
            outcome,
            fits=True,
            peak_bytes=plan.peak_bytes,
            needed_bytes=max(plan.rank_peak_bytes) + UNSEEN_BYTES,
            step_seconds=seconds,
            host_seconds=plan.planned.host_seconds,
            device_seconds=plan.planned.device_seconds,
            tokens_per_second=plan.world_size * tokens / seconds if tokens and seconds else None,
            levers=tuple(lever.name for lever in plan.levers),
            micro_batches=plan.micro_batches,
            rounds=any(lever.exactness is not Exactness.EXACT for lever in plan.levers),
            rank_peak_bytes=plan.rank_peak_bytes,
            communicator_bytes=plan.communicator_bytes,
            host_bytes=plan.host_bytes,
            plan=plan,
        )


def sizes_of(world: World) -> list[int]:
    """The numbers of cards with rows, the most first. Over several nodes, the one that was asked for alone."""
    fewer = [size for size in SIZES if size < world.size] if world.nodes == 1 else []
    return [world.size, *reversed(fewer)]


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
