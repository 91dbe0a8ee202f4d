"""Finds ways out where a step does not fit: other levers, other recipes, another size of the batch, another card.

Each way is run dry, with its levers on, and fits if that trace is within the budget. A way whose weights, gradients and
states alone exceed the budget is not run. The search goes by rank and stops where enough ways of a rank fit.

Where no rank of several cards fits, the other engine and more cards are ways too. A way of theirs is played first with
the levers of about the least memory. One that fits so is planned for all ranks, as it will be when somebody takes it,
and has that plan's figures.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tightfit.devices.known import known_devices
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit, LeverError, in_one_line
from tightfit.levers.micro_batch import batch_size
from tightfit.memory.allocator import old_objects_left_alone
from tightfit.planner.levers import Exactness, Role, Stream, allowed_levers, lever_types
from tightfit.planner.request import Request, optimizer_peak
from tightfit.planner.search.bisection import rough_bound
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.fastest import Refusal
from tightfit.planner.search.least import LeastLevers, as_it_will_run, least_levers, peak_of, sized
from tightfit.planner.search.of_ranks import search_ranks
from tightfit.planner.search.search import Search
from tightfit.planner.search.streaming import stream_at_least
from tightfit.ranks.world import World
from tightfit.recipes import neighbours
from tightfit.recipes.batches import length_of, shortened, with_rows
from tightfit.recipes.choices import EXTRAS, install_line, installed, least_bytes, least_bytes_of_rank, missing_packages
from tightfit.recipes.lines import (
    CodeLines,
    change_in_words,
    in_short,
    keywords_of,
    lines_for,
    overrides_of,
    yaml_of,
)
from tightfit.recipes.records import NOTHING, PRODUCTS, ROUNDING, Recipe
from tightfit.recipes.search import streamable_bytes
from tightfit.recipes.variants import Models, changed_to, held_bytes
from tightfit.recipes.ways import Kind, WayOut, WaysOut, ranked
from tightfit.runtime.outside import outside_training
from tightfit.step import Batch, TokenBatch
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import real_tensors
from tightfit.units import is_share_of

ENOUGH = 4  # ways of a rank after which its other ways are not tried
TOKENS = 64  # a sequence length that matrix units like
MOST_CARDS = 64  # that are tried together; more are a matter for whoever has them
NEARLY = 0.1  # of the budget, by which a rank with all blocks recomputed may exceed it and still be planned
OF_A_NODE = 8  # cards, beyond which a training is spread over several nodes


@outside_training()
@old_objects_left_alone()
@real_tensors()
def ways_out_of(refusal: Refusal | None) -> WaysOut:
    """The ways out of a refusal, ranked; none where no plan was asked for. `CannotFit` asks for it by its name."""
    return WaysOut() if refusal is None else Finder(refusal).found()


def cards_by_memory() -> list[tuple[str, DeviceSpec]]:
    """The cards of the list, the smallest first: for each size of memory, the one of the newest kind."""
    known = [(key, device.spec) for key, device in known_devices().items()]
    newest: dict[int, tuple[str, DeviceSpec]] = {}
    for key, spec in sorted(known, key=lambda each: (each[1].compute_capability or (0, 0), each[0])):
        newest[spec.memory_bytes] = key, spec
    return [newest[size] for size in sorted(newest)]


@dataclass
class Finder:
    """Mutable: the ways found so far, what was tried for them, and the models built."""

    refusal: Refusal
    ways: list[WayOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    begun: set[tuple[Recipe, frozenset[str]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        search = self.refusal.search
        self.search = search
        self.world = search.request.world
        self.device: DeviceSpec = search.request.device
        # Figures of the device, not its name: all dry runs have the same ones. No share of the plain peak, which is
        # another one for each recipe.
        self.asked = search.request.but(device=self.device)
        self.budget: int | str = search.budget if is_share_of(search.budget, "%") else search.budget_bytes
        self.recipe = neighbours.recipe_of(search.request)
        self.levers = search.request.levers
        self.models = Models(search.request.model)

    def found(self) -> WaysOut:
        for rank in self.ranks:
            with self.untried("a further way"):
                rank()
        return WaysOut(ranked(self.ways), self.search.budget_bytes, tuple(dict.fromkeys(self.notes)))

    # Ranks

    @property
    def ranks(self) -> list[Callable[[], None]]:
        """The remedies that are tried, the best first."""
        recipes = [self.try_exact, self.try_rounding, self.try_inexact]
        if self.world is not None:
            tried = [] if self.refusal.recipes_tried else recipes
            return [self.try_sharding, *tried, self.try_sizes, self.try_more_cards, self.try_cards]
        return [*([] if self.refusal.recipes_tried else (*recipes, self.try_sizes)), self.try_cards]

    def try_sharding(self) -> None:
        """FSDP2 over all ranks in the place of DDP or of a copy on each node, on as many cards."""
        if self.world is None or self.world.parallel not in ("ddp", "hsdp"):
            return
        world = World(self.world.size, "fsdp2", self.world.nodes)
        # FSDP2 casts weights and activations itself, where autocast casts what goes into products.
        casts_alike = self.recipe.precision == "fp32" or self.world.is_sharded
        kind, changes = ("rounding", ROUNDING) if casts_alike else ("inexact", PRODUCTS)
        self.on_world(kind, "FSDP2", changes, self.world, world)

    def try_exact(self) -> None:
        """Try remedies that change no bit and that the user did not request: states on the host, the step in backward,
        further levers.
        """
        recipes = list(self.exact_recipes())
        all_exact = self.levers | self.exact_levers()
        self.any_of("exact", recipes, self.levers)
        if all_exact != self.levers:
            self.any_of("exact", [self.recipe], all_exact)
        if not self.has("exact") and all_exact != self.levers:
            self.any_of("exact", recipes, all_exact)

    def try_rounding(self) -> None:
        """Try remedies that are exact to rounding: micro-batches, the loss in chunks, AdamW in one kernel."""
        wider = self.levers | allowed_levers("rounding")
        fused = list(self.fused())
        self.any_of("rounding", fused, self.levers)
        self.any_of("rounding", [self.recipe], wider)  # nothing, where they are the levers that were refused
        if not self.has("exact", "rounding"):
            every = wider | self.exact_levers()
            both = [self.recipe, *self.exact_recipes(), *fused, *(r for f in fused for r in self.stepping(f))]
            self.first_of("rounding", both, every)

    def try_inexact(self) -> None:
        """Try remedies that change the numbers: 16-bit products or weights, 8-bit states, low-rank adapters."""
        request = self.search.request
        cast = neighbours.autocast(request, self.recipe)
        narrow = neighbours.narrow_weights(request, self.recipe) if self.refusal.may_convert else []
        low = [r for r in neighbours.frugal_optimizers(request, self.recipe) if r.changed != self.recipe.changed]
        if self.world is not None and self.world.parallel != "ddp":
            # Most other optimizers do not run on shards, so the weights alone change.
            low, narrow = [replace(each, optimizer=self.recipe.optimizer) for each in narrow[:1]], []
        adapters = self.adapted()
        widest = self.levers | allowed_levers("rounding") | self.exact_levers()
        for levers in dict.fromkeys((self.levers, widest)):
            self.any_of("inexact", [*([] if cast is None else [cast]), *low[:1]], levers)
            self.first_of("inexact", narrow, levers)
            self.first_of("inexact", adapters, levers)
            if self.has("inexact"):
                return
            both = [replace(n, optimizer=each.optimizer) for n in narrow[:1] for each in low]
            both += [r for each in (*low, *both) for r in self.stepping(each)]
            self.first_of("inexact", (*low[1:], *both), levers)
            if self.has("inexact"):
                return

    def try_sizes(self) -> None:
        """A shorter sequence, and a smaller batch: the largest that fits with the levers that are allowed."""
        if self.has("exact", "rounding"):
            return
        if optimizer_peak(self.search.plain) + UNSEEN_BYTES > self.search.budget_bytes:
            return  # weights, gradients and states do not depend on the batch
        batch = self.asked.batch
        length = length_of(batch)
        if length is not None and length > 1:
            unit = TOKENS if length > TOKENS else 1
            self.try_size("sequence", shortened, (length - 1) // unit, unit)
        try:
            rows = batch_size(batch)
        except LeverError:  # no tensor with rows
            return
        unit = self.asked.micro_batches * getattr(self.asked.loss, "rows_together", 1)
        if rows > unit:
            self.try_size("batch", with_rows, rows // unit - 1, unit)

    def try_size(self, what: str, of_size: Callable[[Batch, int], Batch], top: int, unit: int) -> None:
        """The largest number of units, up to `top`, that fits."""
        searches: dict[int, Search] = {}
        levers, _ = least_levers(self.search, self.search.plain, joining=False)

        def search_of(number: int) -> Search:
            if number not in searches:
                asked = self.asked.but(batch=of_size(self.asked.batch, number * unit))
                searches[number] = self.search_for(asked, self.levers)
            return searches[number]

        def excess(number: int) -> int:
            search = search_of(number)
            # A trace of forward and backward reserves more under FSDP2 than a step that others have preceded.
            alone = self.world is None
            peak = peak_of(search, self.search.plain, levers) if alone else as_it_will_run(search, levers).peak_bytes
            return peak + UNSEEN_BYTES - search.budget_bytes

        with self.untried(f"a smaller {what}"):
            number = rough_bound(excess, 0, top)
            while number > 0:
                found = self.least(search_of(number))
                if search_of(number).excess(found) <= 0:
                    self.ways.append(self.of_size(what, number * unit, search_of(number), found))
                    return
                number -= max(1, number // 16)

    def try_more_cards(self) -> None:
        """The fewest cards, doubled, that hold the shards of FSDP2."""
        before = self.world
        if before is None or self.has("exact", "rounding", "inexact"):
            return
        size, least = 2 * before.size, self.search.plain.peak_bytes
        while size <= MOST_CARDS:
            nodes = size // OF_A_NODE if size % OF_A_NODE == 0 else 1
            world = World(size, "fsdp2", max(before.nodes, nodes))
            if least_bytes_of_rank(self.recipe, self.asked.model, world) + UNSEEN_BYTES <= self.search.budget_bytes:
                name = f"{size} cards" if before.parallel == "fsdp2" else f"{size} cards with FSDP2"
                if self.on_world("cards", name, "more samples in a step", before, world):
                    return
                if self.ways[-1].needed_bytes >= least:
                    return  # shards are small already
                least = self.ways[-1].needed_bytes
            size *= 2

    def on_world(self, kind: Kind, name: str, changes: str, before: World, world: World) -> bool:
        """True if the step fits with other cards or another engine. Its way is kept in either case."""
        asked = self.asked.but(world_size=world.size, nodes=world.nodes, parallel=world.parallel, ddp=None)
        with self.untried(name):
            search = self.search_for(asked, self.levers)
            found = self.least(search)
            flags = [] if world.size == before.size else [f"--world-size {world.size}"]
            flags += [] if world.nodes == before.nodes else [f"--nodes {world.nodes}"]
            flags += [] if world.parallel == before.parallel else [f"--parallel {world.parallel}"]
            lines = lines_for(self.recipe, self.recipe, budget=self.budget_in_words, world=world)
            lines = replace(lines, flags=" ".join(flags))
            self.ways.append(self.way(name, kind, changes, search, found, lines))
            return self.ways[-1].fits
        return False

    def try_cards(self) -> None:
        """The smallest card of the list for the recipe as it was asked for; else for the most frugal one."""
        if any(way.fits for way in self.ways):
            return
        widest = self.levers | allowed_levers("rounding") | self.exact_levers()
        frugal = self.adapted()[-1:]
        cards = cards_by_memory()
        trials = [(self.recipe, self.levers), *((recipe, widest) for recipe in frugal)]
        for number, (recipe, levers) in enumerate(trials, start=1):
            with self.untried(f"{recipe.name} on another card"):
                least = self.held_by(recipe)
                room = [(key, spec) for key, spec in cards if spec.memory_bytes > least]
                if not room and number == len(trials):
                    room = cards[-1:]  # for the least bytes, which the answer names
                while room:
                    (key, spec), *larger = room
                    found, excess = self.on_card(key, spec, recipe, levers)
                    # The next one has what this one lacks: the list has several cards of about one size.
                    room = [each for each in larger if each[1].memory_bytes >= spec.memory_bytes + excess]
                    if found.fits or not room:
                        self.ways.append(found)
                    if found.fits:
                        return

    def on_card(self, key: str, spec: DeviceSpec, recipe: Recipe, levers: frozenset[str]) -> tuple[WayOut, int]:
        """A recipe run dry on a card of the list, and the bytes that the card lacks for it."""
        search = self.search_for(self.asked_for(recipe).but(device=spec), levers, "100%")
        found = self.least(search)
        return self.of_card(key, recipe, levers, search, found), search.excess(found)

    # What there is to try

    def exact_levers(self) -> frozenset[str]:
        """The exact levers that the device takes and that save memory, also those that a plan uses only if they are
        named.
        """
        frees = [kind for kind in lever_types() if kind.role is not Role.EXECUTION]
        exact = [kind for kind in frees if kind.exactness is Exactness.EXACT]
        if self.world is not None:
            exact = [kind for kind in exact if not kind.on_request]  # no rank is played with these
        return frozenset(kind.name for kind in exact if kind.refusal(self.device) is None)

    def exact_recipes(self) -> Iterator[Recipe]:
        """States on the host and steps in backward, which are of one process."""
        if self.world is not None:
            return
        others = neighbours.frugal_optimizers(self.search.request, self.recipe)
        yield from (recipe for recipe in others if recipe.changed == self.recipe.changed)
        yield from self.stepping(self.recipe)

    def stepping(self, recipe: Recipe) -> Iterator[Recipe]:
        """The recipe with the step in backward, where that goes."""
        found = None if self.world is not None else neighbours.in_backward(self.search.request, recipe)
        if found is not None:
            yield found

    def adapted(self) -> list[Recipe]:
        """Low-rank adapters, on weights as they are and on narrow ones. Rows of several cards train all weights."""
        may_adapt = self.refusal.may_adapt and self.world is None
        found = neighbours.adapted(self.search.request, self.recipe) if may_adapt else []
        for recipe in found:
            if missing := missing_packages(recipe):
                extras = sorted({EXTRAS[package] for package in missing})
                self.notes.append(f"{recipe.name} needs {' and '.join(missing)}: {install_line(extras)}")
        return installed(found)

    def fused(self) -> Iterator[Recipe]:
        """AdamW in one kernel. On a card, several others need a copy of all weights in between."""
        if neighbours.kind_of(self.asked.optimizer) == "adamw" and self.device.kind != "cpu":
            yield replace(self.recipe, optimizer="adamw_fused")

    # Trying

    def has(self, *kinds: Kind) -> bool:
        return any(way.fits and way.kind in kinds for way in self.ways)

    def any_of(self, kind: Kind, recipes: Iterable[Recipe], levers: frozenset[str]) -> None:
        """Try each recipe with these levers, until enough of the rank fit."""
        for recipe in recipes:
            if sum(way.fits and way.kind == kind for way in self.ways) < ENOUGH:
                self.tried(kind, recipe, levers)

    def first_of(self, kind: Kind, recipes: Iterable[Recipe], levers: frozenset[str]) -> None:
        """Try one recipe after the other, until one fits."""
        for recipe in recipes:
            if self.tried(kind, recipe, levers):
                return

    def tried(self, kind: Kind, recipe: Recipe, levers: frozenset[str]) -> bool:
        """True if the step of a recipe fits with these levers. Its way is kept in either case, if it was run."""
        if (recipe == self.recipe and levers == self.levers) or (recipe, levers) in self.begun:
            return False  # what was refused, and what was tried by another road
        self.begun.add((recipe, levers))
        with self.untried(", ".join(self.words(recipe, levers))):
            seed = self.search.plain if recipe == self.recipe else None
            search = self.search_for(self.asked_for(recipe), levers, plain=seed)
            if self.is_hopeless(recipe, search):
                return False
            # A plan would price blocks as if all gradients stayed, and find nothing better.
            steps_unseen = recipe.step_in_backward and not search.request.settings.step_in_backward
            found = self.plain_candidate(search) if steps_unseen else self.least(search)
            self.ways.append(self.of_recipe(kind, recipe, levers, search, found))
            return self.ways[-1].fits
        return False

    @contextmanager
    def untried(self, name: str) -> Iterator[None]:
        """A context in which a way that cannot be tried becomes a note. The model's own code may raise anything."""
        try:
            yield
        except Exception as error:
            self.notes.append(f"{name} was not tried: {in_one_line(error) or type(error).__name__}")

    def is_hopeless(self, recipe: Recipe, search: Search) -> bool:
        """True if weights, gradients and states alone exceed the budget, by arithmetic, whatever streams."""
        # Other levers lower forward and backward; what the optimizer's phase takes is there with any of them.
        held = optimizer_peak(self.search.plain) if recipe == self.recipe else self.held_by(recipe)
        return held - streamable_bytes(search, recipe) + UNSEEN_BYTES > self.search.budget_bytes

    def held_by(self, recipe: Recipe) -> int:
        """The least bytes of a recipe's weights, gradients and states, by arithmetic."""
        model = self.asked.model if recipe == self.recipe else self.models.of(recipe)
        if self.world is not None:
            return least_bytes_of_rank(recipe, model, self.world)
        return least_bytes(recipe, model, held_bytes(model))

    def asked_for(self, recipe: Recipe) -> Request:
        """The arguments of the plan for a recipe."""
        return self.asked if recipe == self.recipe else changed_to(self.asked, self.recipe, recipe, self.models)

    def search_for(
        self, asked: Request, levers: frozenset[str], budget: int | str | None = None, plain: StepTrace | None = None
    ) -> Search:
        asked = asked.but(levers=sorted(levers))
        # `plain` is the trace of the same step, where the refused search has made it.
        request = asked.checked(may_choose=True)
        return Search(request, self.budget if budget is None else budget, known_plain=plain)

    def plain_candidate(self, search: Search) -> Candidate:
        """The plain step, with the worst of its routings."""
        plain = search.request.plain
        routed = search.tracer.routed_peaks(search.plain, plain, {})
        search.routing_matters = len(routed) > 1
        return Candidate(plain, {}, (), search.plain, worst_bytes=max(routed, default=None))

    def least(self, search: Search) -> Candidate:
        """The plain step if it fits, else the step with the levers of about the least memory, traced as applied, its
        weights streamed where it must and may. With several ranks, that of their plan, where it is near enough.
        """
        found, world = self.least_of_first(search), search.request.world
        if world is None or search.excess(found) > NEARLY * search.budget_bytes:
            return found  # the least that a plan finds is seldom far below
        try:
            planned = search_ranks(search.request, world, search.budget, resorts=not self.refusal.recipes_tried)
        except CannotFit as error:  # another rank does not, or no plan has those levers
            return replace(found, worst_bytes=max(error.least_bytes, search.budget_bytes + 1))
        return replace(planned.candidate, worst_bytes=max(planned.peaks))

    def least_of_first(self, search: Search) -> Candidate:
        """The same of one process, or of the first rank alone."""
        first = self.plain_candidate(search)
        streams = Stream.settings(search.step()) if search.request.may(Stream) else ()
        held = optimizer_peak(search.plain) + UNSEEN_BYTES > search.budget_bytes
        if search.excess(first) <= 0 or (held and not streams):
            return first
        enough = search.budget_bytes - UNSEEN_BYTES
        levers, peak = least_levers(search, search.plain, joining=False, enough=enough)
        found = self.with_levers(search, levers)
        if peak <= enough and search.excess(found) > 0:  # by what a part of a step does not show
            found = self.with_levers(search, least_levers(search, search.plain, joining=False)[0])
        combination = found.combination
        if streams and search.excess(found) > 0:
            stream_at_least(search, combination.without(*search.of_role(Role.WHOLE_BLOCKS)), streams)
            if search.best is not None:
                return search.best
        return min(first, found, key=lambda candidate: candidate.needed_bytes)

    def with_levers(self, search: Search, levers: LeastLevers) -> Candidate:
        combination, policies, trace = sized(search, levers), dict(levers.policies), as_it_will_run(search, levers)
        worst = search.tracer.routed_peaks(trace, combination, policies, levers.joined)
        return Candidate(combination, policies, levers.joined, trace, worst_bytes=max(worst, default=None))

    # Ways

    def words(self, recipe: Recipe, levers: frozenset[str]) -> list[str]:
        """The changes of a remedy, a few words each."""
        words = change_in_words(self.recipe, recipe)
        return [*words, f"levers {', '.join(in_short(levers))}"] if levers != self.levers else words

    @property
    def budget_in_words(self) -> str:
        """The budget as a person would write it, at most the one that was refused."""
        if isinstance(self.budget, str):
            return self.budget
        given = self.search.budget
        if isinstance(given, str) and not is_share_of(given, "x"):
            return given.replace(" ", "")
        return f"{self.budget // 2**20}MiB" if self.budget >= 100 * 2**20 else f"{self.budget}"

    def of_recipe(self, kind: Kind, recipe: Recipe, levers: frozenset[str], search: Search, found: Candidate) -> WayOut:
        changed = None if levers == self.levers else sorted(levers)
        lines = lines_for(self.recipe, recipe, budget=self.budget_in_words, levers=changed, world=search.request.world)
        changes = {"exact": NOTHING, "rounding": ROUNDING}.get(kind, recipe.changes)
        name = " + ".join(self.words(recipe, levers))
        return self.way(name, kind, changes, search, found, lines)

    def of_size(self, what: str, number: int, search: Search, found: Candidate) -> WayOut:
        batch, budget = self.asked.batch, self.budget_in_words
        if isinstance(batch, TokenBatch):
            given = f"tightfit.{search.request.batch}"
        else:
            cut = f"value[:, :{number}]" if what == "sequence" else f"value[:{number}]"
            given = f"{{name: {cut} for name, value in batch.items()}}"
        world = keywords_of(search.request.world)
        python = f'import tightfit; batch = {given}; plan = tightfit.plan(model, batch, "{budget}"{world})'
        is_length = what == "sequence"
        section, key = ("data", "sequence_length") if is_length else ("training", "batch_size")
        sections = {section: {key: number}}
        name = f"sequences of {number:,} tokens" if is_length else f"a batch of {number:,}"
        changes = "shorter sequences" if is_length else "a smaller batch"
        flags = f"--seq-len {number}" if is_length else f"--batch-size {number}"
        yaml = yaml_of({**sections, "memory": {"budget": budget}})
        lines = CodeLines(python=python, yaml=yaml, flags=flags, overrides=overrides_of(sections))
        return self.way(name, "size", changes, search, found, lines)

    def of_card(self, key: str, recipe: Recipe, levers: frozenset[str], search: Search, found: Candidate) -> WayOut:
        spec = search.request.device
        changed = None if levers == self.levers else sorted(levers)
        world = search.request.world
        lines = lines_for(self.recipe, recipe, budget="100%", levers=changed, device=key, world=world)
        words = [spec.name, *change_in_words(self.recipe, recipe)]
        changes = recipe.changes if recipe != self.recipe else "another device"
        return self.way(" + ".join(words), "device", changes, search, found, lines)

    def way(self, name: str, kind: Kind, changes: str, search: Search, found: Candidate, lines: CodeLines) -> WayOut:
        return WayOut(
            name=name,
            kind=kind,
            changes=changes,
            fits=search.excess(found) <= 0,
            peak_bytes=found.peak_bytes,
            needed_bytes=found.needed_bytes,
            step_seconds=found.seconds,
            levers=search.in_words(found),
            python=lines.python,
            yaml=lines.yaml,
            flags=lines.flags,
            overrides=lines.overrides,
            budget=search.budget,
            asked=search.request,
        )
