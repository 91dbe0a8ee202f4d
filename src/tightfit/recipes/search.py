"""Finds what becomes of each recipe within a budget.

Recipes that differ only in the optimizer have the same forward and backward. These are traced and priced once, without
an optimizer's states (`whole_step`). Each optimizer then costs a short trace of its own phase, and a plan is solved
for the memory that its states leave.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tightfit.errors import BudgetError, CannotFit
from tightfit.levers.stream import streamable_weights
from tightfit.names import facts_of
from tightfit.optim.by_name import updates_on_host
from tightfit.planner.api import as_plan, levers_of
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.host import loaded_bytes
from tightfit.planner.levers import Exactness, Stream, find
from tightfit.planner.plans import Plan
from tightfit.planner.records import HostMemory
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.least import LeastLevers
from tightfit.planner.search.search import Search
from tightfit.planner.search.streaming import stream_as_priced, stream_at_least
from tightfit.planner.step_figures import step_host
from tightfit.recipes.batches import token_count
from tightfit.recipes.choices import least_bytes
from tightfit.recipes.leaving_out import LeftOut, leaving_out
from tightfit.recipes.records import Outcome, Recipe
from tightfit.recipes.variants import (
    Models,
    OptimizerOf,
    Variant,
    held_bytes,
    optimizer_of,
    with_recipe,
    without_optimizer,
)
from tightfit.recipes.whole_step import (
    JoinedTracer,
    PartTracer,
    SharedStep,
    WholeStep,
    combinations_to_solve,
    frugal_levers,
    trace_update_of,
    trained,
)
from tightfit.tracing.record import StepTrace
from tightfit.units import is_share_of, parse_budget, parse_bytes

Notice = Callable[[str], None]
OFFLOADED_AGAIN = 3  # how often the levers of such a step are chosen again, each time with a whole trace
# Bits of a weight, by the names of dtypes and of bases of adapters.
BITS = {"nf4": 4, "int8": 8, "fp8": 8, "bf16": 16, "fp32": 32}


@dataclass(frozen=True)
class Found:
    """An outcome, and the levers that it rests on; None if nothing fits."""

    outcome: Outcome
    candidate: Candidate | None = None

    @property
    def recipe(self) -> Recipe:
        return self.outcome.recipe


@dataclass
class RecipeSearch:
    """Mutable: the models built, the steps of variants whose traces recipes share, and what was left out."""

    asked: Request
    budget: int | str
    optimizer: OptimizerOf = optimizer_of
    notice: Notice = lambda line: None
    shared: dict[Variant, SharedStep] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    updates: dict[tuple, StepTrace] = field(default_factory=dict)  # variants that train the same share them
    process_bytes: int = 0  # of the host's memory, beside tensors

    def __post_init__(self) -> None:
        self.budget_bytes = budget_of_recipes(self.asked, self.budget)
        self.models = Models(self.asked.model)

    def asked_for(self, recipe: Recipe) -> Request:
        """The arguments of a plan for a recipe."""
        return with_recipe(self.asked, recipe, self.models.of(recipe), self.optimizer)

    def parts(self, recipes: Sequence[Recipe]) -> list[list[Recipe]]:
        """The recipes in parts that share no trace. Those of the smallest weights come first: where anything fits, they
        do, and a person waits for the first row.
        """
        found: dict[Variant, list[Recipe]] = {}
        for recipe in recipes:
            found.setdefault(Variant.of(recipe)._replace(frees_gradients=False), []).append(recipe)
        return [found[plain] for plain in sorted(found, key=_weight_bits)]

    def run(self, part: Sequence[Recipe]) -> Iterator[Found]:
        """The outcomes of the recipes of a part."""
        done: set[Recipe] = set()
        groups: dict[Variant, list[Recipe]] = {}
        for recipe in part:
            groups.setdefault(Variant.of(recipe), []).append(recipe)
        for variant in sorted(groups, key=lambda variant: variant.frees_gradients):
            # The step in backward frees gradients and changes nothing else, so it is for what does not fit plainly.
            alike = [r for r in groups[variant] if replace(r, step_in_backward=False) not in done]
            if not alike:
                continue
            for each in self.alike(alike):
                if each.outcome.fits and not each.outcome.levers:
                    done.add(each.recipe)
                self.notice(_line(each.outcome))
                yield each

    def alike(self, recipes: Sequence[Recipe]) -> Iterator[Found]:
        """The outcomes of recipes of one variant. One that cannot be tried is left out."""
        waiting = list(recipes)
        with leaving_out(lambda: waiting, self.left_out):
            search, model = self.shared_step(recipes[0]).search, self.models.of(recipes[0])
            held = held_bytes(model)
            limit = search.budget_bytes - UNSEEN_BYTES
            least = {r: least_bytes(r, model, held - streamable_bytes(search, r)) for r in recipes}
            waiting = [r for r in recipes if least[r] <= limit]
            for recipe in (r for r in recipes if r not in waiting):  # weights, gradients and states alone are too large
                yield Found(Outcome(recipe, False, least[recipe], least[recipe] + UNSEEN_BYTES))
            if waiting:
                _ = search.plain  # a step that cannot be run dry is not tried once for each optimizer
            for recipe in waiting:
                with leaving_out([recipe], self.left_out):
                    yield self.of_recipe(search, recipe)

    def shared_step(self, recipe: Recipe) -> SharedStep:
        """Forward and backward of a recipe's variant, which its recipes share with their traces."""
        if (variant := Variant.of(recipe)) not in self.shared:
            request = without_optimizer(self.asked, recipe, self.models.of(recipe)).checked(may_choose=True)
            tracer = PartTracer(request, frees=variant.frees_gradients)
            # No share of the plain peak, so a variant that arithmetic excludes has no trace.
            search = Search(request, self.budget, tracer=tracer, limit_bytes=self.budget_bytes)
            self.shared[variant] = SharedStep(search, variant.frees_gradients)
        return self.shared[variant]

    def whole_step(self, recipe: Recipe) -> WholeStep:
        """A recipe's step as joined traces. Raises the errors of `build_optimizer`."""
        shared, optimizer = self.shared_step(recipe), recipe.optimizer
        if optimizer not in shared.steps:
            trains = (optimizer, shared.frees, tuple(trained(shared.search.request).items()))
            if trains not in self.updates:
                self.updates[trains] = trace_update_of(shared.search, optimizer, frees=shared.frees)
            shared.steps[optimizer] = WholeStep(shared.search, self.updates[trains], shared.frees)
        return shared.steps[optimizer]

    def of_recipe(self, search: Search, recipe: Recipe) -> Found:
        if facts_of(recipe.optimizer).on_host:
            return self.offloaded(search, recipe)
        step = self.whole_step(recipe)
        plain = step.plain
        if search.excess(plain) <= 0:
            return self.found(search, recipe, plain)
        needed = [step.update_peak + UNSEEN_BYTES]
        if needed[0] <= search.budget_bytes:
            needed = []
            for combination in combinations_to_solve(search):
                candidate, least = step.solved_for(combination)
                if candidate is not None:
                    return self.found(search, recipe, candidate)
                needed.append(least)
        if streamable_bytes(search, recipe):
            return self.planned(recipe)  # weights go, which the shared traces of the variant hold
        return Found(Outcome(recipe, False, plain.peak_bytes, min(needed)))

    def offloaded(self, search: Search, recipe: Recipe) -> Found:
        """An optimizer whose states and gradients leave the device in backward, which is traced as the whole step.

        Its levers are those of `search`: a step that uses up each gradient at once and has no states.
        """
        whole = self.whole_search(recipe, search)
        bound = search.budget_bytes - UNSEEN_BYTES
        if search.plain.peak_bytes <= bound:
            candidate = whole.trace_applied(whole.request.plain, {})
            if whole.excess(candidate) <= 0:
                return self.found(whole, recipe, candidate)
        combination = combinations_to_solve(search)[0]
        base = search.baseline(combination)
        needed = search.plain.peak_bytes + UNSEEN_BYTES
        for left in reversed(range(OFFLOADED_AGAIN)):
            within = base.choice_within(bound) if left else None
            # The last one is of the least peak: what the allocator cannot use follows no bound.
            choice = base.least_choice if within is None else within
            candidate = whole.trace_applied(combination, base.policies(choice), base.priced, choice)
            excess = whole.excess(candidate)
            if excess <= 0:
                return self.found(whole, recipe, candidate)
            needed = candidate.needed_bytes
            bound -= excess
            if within is None:
                break
        if streamable_bytes(search, recipe):
            return self.planned(recipe)
        least = max(base.least_bytes + UNSEEN_BYTES, search.budget_bytes + 1)
        return Found(Outcome(recipe, False, needed, least))

    def whole_search(self, recipe: Recipe, variant: Search, plain: StepTrace | None = None) -> Search:
        """A search whose traces are of the recipe's whole step. Its blocks are the variant's."""
        # The budget is no share of the plain peak, so it needs no trace of the plain step.
        return Search(
            self.asked_for(recipe).checked(may_choose=True),
            self.budget,
            known_plain=plain,
            known_paths=variant.paths,
            limit_bytes=variant.budget_bytes,
        )

    def last_resort(self, found: Found) -> Found:
        """A recipe that does not fit, with the levers of least memory, which take many traces to find."""
        recipe = found.recipe
        if facts_of(recipe.optimizer).on_host:
            return found
        step, shared = self.whole_step(recipe), self.shared_step(recipe)
        search = shared.search
        # No search for better levers than the frugal ones would find what fits where states alone exceed the budget.
        last = step.at_last(LeastLevers(*frugal_levers(search)) if step.stays_over else shared.least)
        if last is not None and search.excess(last) <= 0:
            found = self.found(search, recipe, last)
        elif last is not None:
            needed = max(last.needed_bytes, search.budget_bytes + 1)
            found = replace(found, outcome=replace(found.outcome, needed_bytes=needed))
        self.notice(_line(found.outcome))
        return found

    def found(self, search: Search, recipe: Recipe, candidate: Candidate) -> Found:
        """A candidate that fits, as an outcome."""
        return Found(self.outcome(search, recipe, candidate), candidate)

    def outcome(self, search: Search, recipe: Recipe, candidate: Candidate, plan: Plan | None = None) -> Outcome:
        levers = levers_of(search.request, candidate) if plan is None else plan.levers
        own = search.request.plain.levers
        levers = tuple(lever for lever in levers if lever not in own)
        ran = candidate.trace if plan is None else plan.planned
        streamed = find(levers, Stream)
        seconds = ran.step_seconds
        tokens = token_count(self.asked.batch)
        return Outcome(
            recipe=recipe,
            fits=True,
            peak_bytes=ran.peak_bytes,
            needed_bytes=candidate.needed_bytes,
            step_seconds=seconds,
            host_seconds=ran.host_seconds,
            device_seconds=ran.device_seconds,
            tokens_per_second=tokens / seconds if tokens and seconds else None,
            levers=tuple(lever.name for lever in levers),
            streamed_blocks=0 if streamed is None else len(streamed.paths),
            blocks=0 if streamed is None else len(search.paths),
            micro_batches=candidate.combination.micro_batches,
            rounds=any(lever.exactness is not Exactness.EXACT for lever in levers),
            host_peak_bytes=self.host_peak_bytes(search.request, candidate.trace, streamed),
            from_file=streamed is not None and streamed.folder is not None,
            plan=plan,
        )

    def host_peak_bytes(self, request: Request, trace: StepTrace, stream: Stream | None) -> int:
        """The peak of the host's memory: while weights are loaded, or in a step."""
        held = step_host(trace)
        loaded = loaded_bytes(request, stream) if request.device.kind != "cpu" else 0
        return sum(HostMemory(self.process_bytes, loaded).by_category(held).values())

    def streamed(self, found: Found) -> Found:
        """A recipe that does not fit, with weights on the host: in its memory, or in a file where that is too small."""
        streamed = self._streamed(found, in_file=False)
        if self.asked.host_budget is not None:
            limit = parse_bytes(self.asked.host_budget)
            if (streamed.outcome.host_peak_bytes or 0) > limit:
                in_file = self._streamed(found, in_file=True)
                streamed = in_file if (in_file.outcome.host_peak_bytes or 0) <= limit else streamed
        if streamed is not found:
            self.notice(_line(streamed.outcome))
        return streamed

    def _streamed(self, found: Found, *, in_file: bool) -> Found:
        """The choice of streamed blocks and recompute that is fastest by its prices, or every block at its least with
        as few streamed as fit; `found` if nothing fits.
        """
        recipe = found.recipe
        step = self.whole_step(recipe)
        best = _best_streamed(search := self.streamed_search(recipe, in_file=in_file, by=step))
        if best is None:
            return found
        if not facts_of(recipe.optimizer).on_host:
            return Found(self.outcome(search, recipe, best), best)
        # What the optimizer takes of the host's memory is in a whole trace alone.
        search = self.streamed_search(recipe, in_file=in_file, plain=step.plain.trace)
        candidate = search.trace_applied(best.combination, best.policies, best.priced, best.choice)
        if search.excess(candidate) > 0:
            return self._streamed_whole(found, in_file=in_file)
        return Found(self.outcome(search, recipe, candidate), candidate)

    def _streamed_whole(self, found: Found, *, in_file: bool) -> Found:
        """The same by traces of the whole step."""
        search = self.streamed_search(found.recipe, in_file=in_file)
        best = _best_streamed(search)
        if best is None:
            return found
        return Found(self.outcome(search, found.recipe, best, as_plan(search, best)), best)

    def streamed_search(
        self, recipe: Recipe, *, in_file: bool = False, by: WholeStep | None = None, plain: StepTrace | None = None
    ) -> Search:
        """A search that may stream weights, of the recipe's whole step, or of the joined traces of one (`by`). `plain`:
        the trace of the plain step, where it is known.
        """
        shared = self.shared_step(recipe).search
        asked = self.asked_for(recipe)
        asked = asked.but(levers=[str(asked.levers_named), Stream.name], weights_in_file=in_file)
        request = asked.checked(may_choose=True)
        search = Search(
            request, self.budget, known_plain=plain, known_paths=shared.paths, limit_bytes=self.budget_bytes
        )
        if by is not None:
            assert isinstance(shared.tracer, PartTracer), "recipes share traces of a part"
            # The levels of an optimizer that runs on the host are those of backward.
            update = None if facts_of(recipe.optimizer).on_host else by.update
            search.tracer = JoinedTracer(request, frees=by.frees, equal=shared.tracer.equal, update=update)
        return search

    # Traced whole

    def planned(self, recipe: Recipe) -> Found:
        """A recipe planned as `tightfit.plan` would."""
        search = Search(self.asked_for(recipe).checked(may_choose=True), self.budget)
        try:
            candidate = fastest(search)
        except CannotFit as error:
            needed = max(error.least_bytes, search.budget_bytes + 1)
            return Found(Outcome(recipe, False, search.plain.peak_bytes, needed))
        return Found(self.outcome(search, recipe, candidate, as_plan(search, candidate)), candidate)

    def confirmed(self, found: Found) -> Found:
        """A recipe that fits, with its levers traced as the whole step, optimizer included, and its plan."""
        recipe, candidate = found.recipe, found.candidate
        if found.outcome.plan is not None or candidate is None:
            return found
        # The plain step is known; a trace of it would say the same again.
        plain, stream = self.whole_step(recipe).plain.trace, candidate.combination.get(Stream)
        if stream is None:
            search = self.whole_search(recipe, self.shared_step(recipe).search, plain)
        else:
            search = self.streamed_search(recipe, in_file=stream.folder is not None, plain=plain)
        search.routing_matters = search.plain.peak_depends_on_data
        if facts_of(recipe.optimizer).on_host and not search.routing_matters:
            whole = candidate  # it was traced as the whole step when it was found
        else:
            whole = search.trace_applied(
                candidate.combination, candidate.policies, candidate.priced, candidate.choice, candidate.joined
            )
        if search.excess(whole) > 0:
            if stream is None:
                return self.planned(recipe)
            return self._streamed_whole(
                Found(Outcome(recipe, False, whole.peak_bytes, whole.needed_bytes)), in_file=stream.folder is not None
            )
        search.best = whole
        return Found(self.outcome(search, recipe, whole, as_plan(search, whole)), whole)


def _best_streamed(search: Search) -> Candidate | None:
    search.routing_matters = search.plain.peak_depends_on_data
    if settings := Stream.settings(search.step()):
        base = frugal_levers(search)[0]
        if not stream_as_priced(search, base, settings, most=1):
            stream_at_least(search, base, settings)
    return search.best


def streamable_bytes(search: Search, recipe: Recipe) -> int:
    """Bytes of weights that need not be on the device, but for those of the blocks that run; 0 where none may leave."""
    if not search.request.may(Stream):
        return 0
    model, on_card = search.request.model, search.request.device.kind != "cpu"
    trained = updates_on_host(recipe.optimizer, on_card=on_card)
    blocks = streamable_weights(model, find_blocks(model, search.request.blocks), trained=trained)
    sizes = [sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in b}.values()) for b in blocks]
    return sum(sizes) - max(sizes, default=0)


def budget_of_recipes(asked: Request, budget: int | str) -> int:
    """The budget in bytes, the same for all recipes. Raises `BudgetError`."""
    if is_share_of(budget, "x"):
        raise BudgetError(f"budget {budget!r} is a share of one recipe's plain peak: give bytes, or 80%")
    return parse_budget(budget, device_bytes=asked.device.memory_bytes)


def _weight_bits(variant: Variant) -> int:
    base = variant.dtype if variant.adapter is None else variant.adapter.base
    return BITS[base]


def _line(outcome: Outcome) -> str:
    from tightfit.units import format_bytes

    if outcome.fits:
        return f"{outcome.name}: fits with {format_bytes(outcome.peak_bytes)}"
    return f"{outcome.name}: needs {format_bytes(outcome.needed_bytes)} at least"
