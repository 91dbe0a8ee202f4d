"""Traces the trade-off curve: peak against step time, from the plain step down to the least that can be reached.

The blocks' prices do not depend on the budget, so those of the search serve all budgets. For each budget on the way
down, the choice is solved again and traced as applied: forward and backward of one micro-batch. Traces do not depend on
each other, so forks of this process share them. No choice changes the optimizer's phase, so its peak and seconds are
those of the plain step. The curve consists of the traced points that no other point beats in both peak and seconds.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from tightfit.errors import CompileError, LeverError
from tightfit.levers.recompute import Policy
from tightfit.levers.recompute.rule import every_block, every_second_block
from tightfit.planner.blocks.solve import Solution, least_peak, solve
from tightfit.planner.curves import Curve, frontier
from tightfit.planner.levers import ChunkedLoss, Combination, Lever, Role, lever_types
from tightfit.planner.records import CurvePoint
from tightfit.planner.request import optimizer_peak
from tightfit.planner.search.candidates import Baseline, describe_levers
from tightfit.planner.search.search import Search

POINTS = 8  # budgets between the plain peak and the least; each needs one solve and one trace
Choice = tuple[Baseline, Solution]


class NamedLevers(NamedTuple):
    """Levers of a step, with their name."""

    name: str
    combination: Combination
    policies: Mapping[str, Policy]
    joined: Sequence[str] = ()


class Tradeoff:
    """The curve of one search. Mutable: the points traced so far."""

    def __init__(self, search: Search):
        self.search = search
        self.points: list[CurvePoint] = []

    def curve(self, count: int = POINTS) -> Curve:
        """The curve through about `count` budgets, and the recipes."""
        plain = CurvePoint("no lever", self.search.plain.peak_bytes, self.search.plain.step_seconds)
        if self.search.best is not None:
            best = self.search.best
            self.points.append(CurvePoint(self.search.in_words(best), best.peak_bytes, best.seconds))
        recipes, choices = self.recipes(), self.descend(self.search.baselines(), count)
        traced = self.search.shared(lambda each: self.point(*each), [*recipes, *choices])
        fixed = (plain, *traced[: len(recipes)])
        self.points += [recipe for recipe in fixed if self.allowed(recipe)]
        self.points += traced[len(recipes) :]
        return Curve(frontier(self.points), fixed)

    # The frontier

    def descend(self, baselines: Sequence[Baseline], count: int) -> list[NamedLevers]:
        """The best choice at each of `count` budgets from the plain peak down to the least."""
        solvable = [baseline for baseline in baselines if baseline.priced is not None]
        for baseline in baselines:
            levers = describe_levers(baseline.combination, {}, len(self.search.paths))
            self.points.append(CurvePoint(levers, baseline.peak_bytes, baseline.seconds))
        for kind in self.search.of_role(Role.WHOLE_BLOCKS):
            for combination in self.search.combinations():
                self.take_whole_blocks(combination, kind)
        if not solvable:
            return []  # no blocks, or no lever inside them: the baselines above are all there is
        lowest = min(((p, least_peak(p.chain)) for p in solvable), key=lambda choice: choice[1].peak_bytes)
        top, bottom = self.search.plain.peak_bytes, lowest[1].peak_bytes
        budgets = (top - step * (top - bottom) // count for step in range(1, count + 1))
        found = [*(self.best(solvable, budget) for budget in budgets), lowest]
        # Neighbouring budgets often have one solution, and a point of 1B takes 0.2-0.4 s to trace.
        different = {(each[0].combination, each[1].choice): each for each in found if each is not None}
        return [*(self.chosen(*each) for each in different.values()), *self.joined(lowest[0])]

    def best(self, baselines: Sequence[Baseline], budget: int) -> Choice | None:
        """The fastest choice within a budget over all combinations, as priced."""
        found: Choice | None = None
        for baseline in sorted(baselines, key=lambda p: p.seconds):
            # A choice inside blocks only adds seconds to its baseline, so no later baseline can win.
            if found is not None and baseline.seconds >= _seconds(found):
                break
            solution = solve(baseline.chain, budget)
            if solution is not None and (found is None or baseline.seconds + solution.seconds < _seconds(found)):
                found = (baseline, solution)
        return found

    def chosen(self, baseline: Baseline, solution: Solution) -> NamedLevers:
        """A choice inside blocks."""
        assert baseline.priced is not None, "a solution is that of a priced baseline"
        return self.applied(baseline.combination, baseline.priced.policies(solution.choice))

    def joined(self, baseline: Baseline) -> list[NamedLevers]:
        """Blocks joined to a few segments, which also recompute the blocks' outputs."""
        paths = self.search.paths
        counts = sorted({len(paths) // 2, math.isqrt(len(paths))} - {0, len(paths)}, reverse=True)
        rules = [every_block(paths, segments=segments) for segments in counts]
        return [self.applied(baseline.combination, rule.policies, rule.joined) for rule in rules]

    def take_whole_blocks(self, combination: Combination, kind: type[Lever]) -> None:
        """Trace each setting of a lever on whole blocks. A model that does not compile gets no points."""
        try:
            for setting in kind.settings(self.search.step()):
                self.points.append(self.point(*self.applied(combination.with_lever(setting), {})))
        except CompileError:
            return  # the search has recorded the reason among the rejected combinations

    def applied(
        self, combination: Combination, policies: Mapping[str, Policy], joined: Sequence[str] = ()
    ) -> NamedLevers:
        """Levers, named by how many blocks do what."""
        name = describe_levers(combination, policies, len(self.search.paths), len(joined))
        return NamedLevers(name, combination, policies, joined)

    # Recipes

    def recipes(self) -> list[NamedLevers]:
        """The fixed recipes that people use without a plan."""
        plain, paths = self.search.request.plain, self.search.paths
        every, second = every_block(paths).policies, every_second_block(paths).policies
        found = []
        if paths:
            found.append(NamedLevers("every block recomputed", plain, every))
        if second:
            found.append(NamedLevers("every second block recomputed", plain, second))
        for chunked in map(plain.with_lever, ChunkedLoss.settings(self.search.step())):
            found.append(NamedLevers("chunked loss", chunked, {}))
            if paths:
                found.append(NamedLevers("chunked loss, every block recomputed", chunked, every))
        return found

    def try_forbidden(self) -> None:
        """Trace each lever that was not allowed, at its fastest setting, and put the figures into its row of the
        rejected combinations. The search itself only names these levers.
        """
        titles = {kind.title: kind for kind in lever_types() if not self.search.request.may(kind)}
        for index, rejected in enumerate(self.search.rejected):
            kind = titles.get(rejected.levers)
            if kind is not None and rejected.peak_bytes is None:
                point = self.point_of(kind)
                if point is not None:
                    self.search.rejected[index] = replace(
                        rejected, levers=point.levers, peak_bytes=point.peak_bytes, step_seconds=point.step_seconds
                    )

    def point_of(self, kind: type[Lever]) -> CurvePoint | None:
        """The plain step with the fastest setting of a lever; None if the lever has no setting or cannot be applied."""
        plain = self.search.request.plain
        for setting in kind.settings(self.search.step())[:1]:
            if kind.role is Role.INSIDE_BLOCKS:
                return None  # such a lever has no single setting: its figures would need a solve of their own
            with suppress(LeverError):  # a module that cannot be tiled leaves the row without figures
                return self.point(str(setting), plain.with_lever(setting), {})
        return None

    def allowed(self, recipe: CurvePoint) -> bool:
        """True if a plan may use the recipe's levers, so that the recipe may be a point of the curve."""
        return "chunked loss" not in recipe.levers or self.search.request.may(ChunkedLoss)

    # Both

    def point(
        self, levers: str, combination: Combination, policies: Mapping[str, Policy], joined: Sequence[str] = ()
    ) -> CurvePoint:
        """Predict peak and seconds of the step with these levers, by a dry run."""
        search = self.search
        trace = search.tracer.part(combination, policies, search.plain, joined)
        peak = max(trace.peak_bytes, optimizer_peak(search.plain))
        return CurvePoint(levers, peak, search.with_optimizer(trace))


def _seconds(choice: Choice) -> float:
    baseline, solution = choice
    return baseline.seconds + solution.seconds
