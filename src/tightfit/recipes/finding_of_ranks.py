"""Finds ways out where no rank of several cards fits: the other engine, other recipes, another size, more cards.

A way is played first with the levers of about the least memory. One that fits so is planned for all ranks, as it will
be when somebody takes it, and has that plan's figures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tightfit.errors import CannotFit
from tightfit.planner.levers import allowed_levers, lever_types
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.least import Way, as_it_will_run
from tightfit.planner.search.of_ranks import search_ranks
from tightfit.planner.search.search import Search
from tightfit.ranks.world import World
from tightfit.recipes import neighbours
from tightfit.recipes.choices import least_bytes_of_rank
from tightfit.recipes.finding import Finder, Trial
from tightfit.recipes.lines import Lines, lines_for
from tightfit.recipes.records import PRODUCTS, ROUNDING, Recipe
from tightfit.recipes.ways import Kind

MOST_CARDS = 64  # that are tried; more are a matter for whoever has them
NEARLY = 0.1  # of the budget, by which a step with all blocks recomputed may exceed it and still be planned
OF_A_NODE = 8  # cards, beyond which a training is spread over several nodes


@dataclass
class RanksFinder(Finder):
    """Mutable, as its base is."""

    @property
    def world(self) -> World:
        world = self.search.request.world
        assert world is not None, "asked by the caller"
        return world

    @property
    def ranks(self) -> list[Callable[[], None]]:
        recipes = [self.try_exact, self.try_rounding, self.try_inexact]
        tried = [] if self.refusal.recipes_tried else recipes
        return [self.try_sharding, *tried, self.try_sizes, self.try_more_cards, self.try_cards]

    def try_sharding(self) -> None:
        """FSDP2 in the place of DDP, on as many cards."""
        if self.world.parallel != "ddp":
            return
        world = World(self.world.size, "fsdp2", self.world.nodes)
        # FSDP2 casts weights and activations itself, where autocast casts what goes into products.
        kind, changes = ("rounding", ROUNDING) if self.recipe.precision == "fp32" else ("inexact", PRODUCTS)
        self.on_world(kind, "FSDP2", changes, world)

    def try_inexact(self) -> None:
        if self.world.parallel == "ddp":
            super().try_inexact()
            return
        # Most other optimizers do not run on shards, so the weights alone change.
        request = self.search.request
        cast = neighbours.autocast(request, self.recipe)
        narrow = neighbours.narrow_weights(request, self.recipe) if self.refusal.may_convert else []
        low = [
            *([] if cast is None else [cast]),
            *(replace(each, optimizer=self.recipe.optimizer) for each in narrow[:1]),
        ]
        for levers in dict.fromkeys((self.levers, self.levers | allowed_levers("rounding") | self.exact_levers())):
            self.any_of(Trial("inexact", recipe, levers) for recipe in low)
            if self.has("inexact"):
                return

    def try_more_cards(self) -> None:
        """The fewest cards, doubled, that hold the shards of FSDP2."""
        if self.has("exact", "rounding", "inexact"):
            return
        size, least = 2 * self.world.size, self.search.plain.peak_bytes
        while size <= MOST_CARDS:
            nodes = size // OF_A_NODE if size % OF_A_NODE == 0 else 1
            world = World(size, "fsdp2", max(self.world.nodes, nodes))
            if least_bytes_of_rank(self.recipe, self.asked.model, world) + UNSEEN_BYTES <= self.search.budget_bytes:
                name = f"{size} cards" if self.world.parallel == "fsdp2" else f"{size} cards with FSDP2"
                if self.on_world("cards", name, "more samples in a step", world):
                    return
                if self.ways[-1].needed_bytes >= least:
                    return  # shards are small already
                least = self.ways[-1].needed_bytes
            size *= 2

    def on_world(self, kind: Kind, name: str, changes: str, world: World) -> bool:
        """True if the step fits with other cards or another engine. Its way is kept in either case."""
        asked = self.asked.but(world_size=world.size, nodes=world.nodes, parallel=world.parallel, ddp=None)
        with self.untried(name):
            search = self.search_for(asked, self.levers)
            found = self.least(search)
            self.ways.append(self.way(name, kind, changes, search, found, self.lines_of(world)))
            return self.ways[-1].fits
        return False

    def lines_of(self, world: World) -> Lines:
        before, budget = self.world, self.budget_in_words
        flags = [] if world.size == before.size else [f"--world-size {world.size}"]
        flags += [] if world.nodes == before.nodes else [f"--nodes {world.nodes}"]
        flags += [] if world.parallel == before.parallel else [f"--parallel {world.parallel}"]
        lines = lines_for(self.recipe, self.recipe, budget=budget, world=world)
        return replace(lines, flags=" ".join(flags))

    # What there is to try

    def exact_levers(self) -> frozenset[str]:
        requested = {kind.name for kind in lever_types() if kind.on_request}
        return super().exact_levers() - requested  # no rank is played with these

    def exact_recipes(self) -> Iterator[Recipe]:
        """None: states on the host and steps in backward are of one process."""
        yield from ()

    def stepping(self, recipe: Recipe) -> Iterator[Recipe]:
        yield from ()

    def adapted(self) -> list[Recipe]:
        """None: rows of several cards train all weights."""
        return []

    def held_by(self, recipe: Recipe) -> int:
        model = self.asked.model if recipe == self.recipe else self.models.of(recipe)
        return least_bytes_of_rank(recipe, model, self.world)

    def about_peak(self, search: Search, way: Way) -> int:
        # A trace of forward and backward reserves more under FSDP2 than a step that others have preceded.
        return as_it_will_run(search, way).peak_bytes

    def least(self, search: Search) -> Candidate:
        found = super().least(search)
        world = search.request.world
        if search.excess(found) > NEARLY * search.budget_bytes or world is None:
            return found  # the least that a plan finds is seldom far below
        try:
            planned = search_ranks(search.request, world, search.budget, resorts=not self.refusal.recipes_tried)
        except CannotFit as error:  # another rank does not, or no plan has those levers
            return replace(found, worst_bytes=max(error.least_bytes, search.budget_bytes + 1))
        return replace(planned.candidate, worst_bytes=max(planned.peaks))
