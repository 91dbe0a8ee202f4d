"""Traces the trade-off curve: peak against step time, from the plain step down to the least that can be reached.

What was priced for a budget serves all others: the blocks' options do not depend on it. For each budget on the way
down the choice is solved anew, and what comes out is traced as applied, forward and backward of one micro-batch; the
optimizer's phase, which no choice moves, is that of the plain step. The curve is what no other traced point beats.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tightfit.errors import CompileError, LeverError
from tightfit.levers.recompute import RECOMPUTE_ALL, Policy
from tightfit.levers.recompute.lever import segment_ends
from tightfit.planner.candidates import Prospect, describe_levers
from tightfit.planner.curve import Curve, frontier
from tightfit.planner.head import find_head
from tightfit.planner.records import ChunkedLoss, CurvePoint, Rejected
from tightfit.planner.request import Combination, optimizer_peak
from tightfit.planner.search import Search
from tightfit.planner.solve import Solution, least_peak, solve
from tightfit.planner.variants import compiled_alike, tiled

POINTS = 8  # budgets between the plain peak and the least, for each of which a choice is solved and traced
Choice = tuple[Prospect, Solution]


class Tradeoff:
    """The curve of one search. Mutable: the points traced so far."""

    def __init__(self, search: Search):
        self.search = search
        self.points: list[CurvePoint] = []
        self.traced: set[tuple[Combination, tuple[int, ...]]] = set()

    def curve(self, count: int = POINTS) -> Curve:
        """The curve through about `count` budgets, and the recipes."""
        plain = CurvePoint("no lever", self.search.plain.peak_bytes, self.search.plain.step_seconds)
        recipes = (plain, *self.recipes())
        self.points += [recipe for recipe in recipes if self.allowed(recipe)]
        if self.search.best is not None:
            best = self.search.best
            self.points.append(CurvePoint(self.search.in_words(best), best.peak_bytes, best.seconds))
        self.descend(self.search.prospects(), count)
        return Curve(frontier(self.points), recipes)

    # The frontier

    def descend(self, prospects: Sequence[Prospect], count: int) -> None:
        """Trace the best choice at each of `count` budgets from the plain peak down to the least."""
        solvable = [prospect for prospect in prospects if prospect.priced is not None]
        for prospect in prospects:
            levers = describe_levers(prospect.combination, {}, len(self.search.paths))
            self.points.append(CurvePoint(levers, prospect.peak_bytes, prospect.seconds))
        for combination in self.search.combinations() if "compile" in self.search.request.levers else []:
            self.compile(combination)
        if not solvable:
            return
        lowest = min(((p, least_peak(p.chain)) for p in solvable), key=lambda choice: choice[1].peak_bytes)
        top, bottom = self.search.plain.peak_bytes, lowest[1].peak_bytes
        for step in range(1, count + 1):
            found = self.best(solvable, top - step * (top - bottom) // count)
            if found is not None:
                self.trace(*found)
        self.trace(*lowest)
        self.join(lowest[0])

    def best(self, prospects: Sequence[Prospect], budget: int) -> Choice | None:
        """The fastest choice within a budget over all combinations, by the prices."""
        found: Choice | None = None
        for prospect in sorted(prospects, key=lambda p: p.seconds):
            if found is not None and prospect.seconds >= _seconds(found):
                break
            solution = solve(prospect.chain, budget)
            if solution is not None and (found is None or prospect.seconds + solution.seconds < _seconds(found)):
                found = (prospect, solution)
        return found

    def trace(self, prospect: Prospect, solution: Solution) -> None:
        """Put a choice on the model and run it dry, unless that was done."""
        key = (prospect.combination, solution.choice)
        if key in self.traced:
            return
        self.traced.add(key)
        assert prospect.priced is not None, "a solution is that of a priced prospect"
        self.apply(prospect.combination, prospect.priced.policies(solution.choice))

    def join(self, prospect: Prospect) -> None:
        """Blocks joined to a few segments, whose outputs are recomputed too."""
        paths = self.search.paths
        policies = dict.fromkeys(paths, RECOMPUTE_ALL)
        for segments in sorted({len(paths) // 2, math.isqrt(len(paths))} - {0, len(paths)}, reverse=True):
            ends = segment_ends(len(paths), segments)
            self.apply(prospect.combination, policies, tuple(p for i, p in enumerate(paths) if i not in ends))

    def compile(self, combination: Combination) -> None:
        """The blocks compiled, each share that they may keep; nothing where that is not possible."""
        try:
            for compiled in compiled_alike(combination, self.search.paths):
                self.apply(compiled, {})
        except CompileError:
            return  # the plan says why

    def apply(self, combination: Combination, policies: Mapping[str, Policy], joined: Sequence[str] = ()) -> None:
        levers = describe_levers(combination, policies, len(self.search.paths), len(joined))
        self.points.append(self.point(levers, combination, policies, joined))

    # Recipes

    def recipes(self) -> list[CurvePoint]:
        """What is done without a plan, each traced as applied."""
        plain, paths = Combination(self.search.request.micro_batches), self.search.paths
        every, second = dict.fromkeys(paths, RECOMPUTE_ALL), dict.fromkeys(paths[1::2], RECOMPUTE_ALL)
        head = find_head(self.search.plain, self.search.request.model)
        found = []
        if paths:
            found.append(self.point("every block recomputed", plain, every))
        if second:
            found.append(self.point("every second block recomputed", plain, second))
        if head is not None:
            chunked = Combination(plain.micro_batches, ChunkedLoss(head, None))
            found.append(self.point("chunked loss", chunked, {}))
            if paths:
                found.append(self.point("chunked loss, every block recomputed", chunked, every))
        return found

    def try_forbidden(self, recipes: Sequence[CurvePoint]) -> None:
        """Give the levers that were not allowed, which the search only names, the figures that they would have had."""
        traced = {recipe.levers: recipe for recipe in recipes}
        for index, rejected in enumerate(self.search.rejected):
            point = traced.get(rejected.levers) or self.with_more_micro_batches(rejected) or self.with_tiles(rejected)
            if point is not None and rejected.peak_bytes is None:
                self.search.rejected[index] = Rejected(
                    point.levers, rejected.reason, point.peak_bytes, point.step_seconds
                )

    def with_more_micro_batches(self, rejected: Rejected) -> CurvePoint | None:
        """The fewest micro-batches more than the plain step has, where it is them that were rejected."""
        request = self.search.request
        if rejected.levers != "micro batch":
            return None
        counts = [n for n in range(request.micro_batches + 1, request.size + 1) if request.size % n == 0]
        return self.point(str(Combination(counts[0])), Combination(counts[0]), {}) if counts else None

    def with_tiles(self, rejected: Rejected) -> CurvePoint | None:
        """The plain step with the fewest tiles, where it is them that were rejected, and there can be any."""
        if rejected.levers != "tile":
            return None
        search = self.search
        plain = Combination(search.request.micro_batches)
        for combination in tiled(plain, search.request, search.plain, search.paths)[:1]:
            with suppress(LeverError):  # a module that cannot be tiled
                return self.point(str(combination), combination, {})
        return None

    def allowed(self, recipe: CurvePoint) -> bool:
        """Whether a plan might do the same."""
        return "chunked loss" not in recipe.levers or "chunked_loss" in self.search.request.levers

    # Both

    def point(
        self, levers: str, combination: Combination, policies: Mapping[str, Policy], joined: Sequence[str] = ()
    ) -> CurvePoint:
        """The peak and the seconds of the step with these levers, run dry."""
        search = self.search
        trace = search.tracer.part(combination, policies, search.plain, joined)
        peak = max(trace.peak_bytes, optimizer_peak(search.plain))
        return CurvePoint(levers, peak, search.with_optimizer(trace))


def _seconds(choice: Choice) -> float:
    prospect, solution = choice
    return prospect.seconds + solution.seconds
