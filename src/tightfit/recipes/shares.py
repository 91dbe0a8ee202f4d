"""The recipes of a question shared among processes, each of which keeps the traces of its own.

Recipes of different weights share no trace. So a process that has found what becomes of some also confirms them and
finds their sizes. What goes between processes are recipes and outcomes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tightfit.errors import InputError
from tightfit.recipes.leaving_out import LeftOut, leaving_out
from tightfit.recipes.records import LargestSize, Outcome, Recipe
from tightfit.recipes.search import Found, RecipeSearch
from tightfit.recipes.sizes import with_sizes
from tightfit.recipes.variants import Variant
from tightfit.runtime.forked import Crew, Notice, processes_for, shared_out


class Row(NamedTuple):
    """An outcome, the number of the process that has its traces, and whether a whole trace of it is cheap."""

    outcome: Outcome
    process: int
    is_small: bool

    @property
    def recipe(self) -> Recipe:
        return self.outcome.recipe


class _Answer(NamedTuple):
    """The outcomes of some recipes, and those that were left out."""

    rows: list[tuple[Outcome, bool]]
    left_out: list[LeftOut]


class _Sized(NamedTuple):
    """The longest sequence and the largest batch of some recipes, and the sizes that were left out."""

    sizes: dict[Recipe, tuple[LargestSize | None, LargestSize | None]]
    left_out: list[LeftOut]


class _Size(NamedTuple):
    """A recipe whose largest sizes are asked for, and whether dry runs confirm them."""

    recipe: Recipe
    confirm: bool


@dataclass
class _Share:
    """The results of one process. `processes` may find sizes; `is_only` says that nobody else has recipes. Mutable."""

    search: RecipeSearch
    processes: int
    is_only: bool
    found: dict[Recipe, Found] = field(default_factory=dict)

    def do(self, asked: tuple[str, Sequence[Any]], notice: Notice) -> Any:
        """One of the methods below, by its name."""
        method, arguments = asked
        self.search.notice = notice
        return getattr(self, method)(arguments)

    def searched(self, part: Sequence[Recipe]) -> _Answer:
        known = len(self.search.left_out)
        found = {each.recipe: each for each in self.search.run(part)}
        self.found |= found
        return _Answer([self._row(each) for each in found.values()], self.search.left_out[known:])

    def confirmed(self, recipes: Sequence[Recipe]) -> _Answer:
        return self._changed(recipes, self.search.confirmed)

    def at_last(self, recipes: Sequence[Recipe]) -> _Answer:
        return self._changed(recipes, self.search.last_resort, "the levers of least memory of ")

    def streamed(self, recipes: Sequence[Recipe]) -> _Answer:
        return self._changed(recipes, self.search.streamed, "streamed weights of ")

    def sized(self, wanted: Sequence[_Size]) -> _Sized:
        # Recipes of one variant share dry runs, so they stay together. Those that take longest come first.
        parts: dict[Variant, list[_Size]] = {}
        for each in wanted:
            parts.setdefault(Variant.of(each.recipe), []).append(each)
        ordered = sorted(parts.values(), key=_dry_runs, reverse=True)
        # Another process may have less to do: a fork of this one then takes what is left here.
        processes = min(self.processes, processes_for(len(ordered)))
        found = _Sized({}, [])
        for part in shared_out(self._sized_alike, ordered, self.search.notice, processes):
            found.sizes.update(part.sizes)
            found.left_out.extend(part.left_out)
        return found

    def _sized_alike(self, part: Sequence[_Size], notice: Notice) -> _Sized:
        done = _Sized({}, [])
        for recipe, confirm in part:
            with leaving_out([recipe], done.left_out, "the largest sizes of "):
                outcome = with_sizes(self.search, self._known(recipe), confirm=confirm).outcome
                if outcome.longest_sequence is not None:
                    notice(f"{outcome.name}: sequences of {outcome.longest_sequence} tokens")
                done.sizes[recipe] = (outcome.longest_sequence, outcome.largest_batch)
        return done

    def _changed(self, recipes: Sequence[Recipe], change: Callable[[Found], Found], what: str = "") -> _Answer:
        done = _Answer([], [])
        for recipe in recipes:
            with leaving_out([recipe], done.left_out, what):
                self.found[recipe] = change(self._known(recipe))
                done.rows.append(self._row(self.found[recipe]))
        return done

    def _known(self, recipe: Recipe) -> Found:
        """The result of a recipe, computed anew if need be: the process that had found it may have been ended."""
        if recipe not in self.found:
            known = len(self.search.left_out)
            self.found |= {each.recipe: each for each in self.search.alike([recipe])}
            if len(self.search.left_out) > known:
                raise InputError(self.search.left_out[known].reason)
        return self.found[recipe]

    def _row(self, found: Found) -> tuple[Outcome, bool]:
        # A plan holds its model, which stays where it is.
        outcome = found.outcome if self.is_only else replace(found.outcome, plan=None)
        # Only rows that fit are traced again, and one that arithmetic excludes has no trace to count.
        is_traced = outcome.fits and not outcome.streamed_blocks
        return outcome, is_traced and self.search.shared_step(found.recipe).search.is_small


class Shares:
    """All processes of a question. Use it in a `with` statement."""

    def __init__(self, search: RecipeSearch, recipes: Sequence[Recipe], processes: int):
        self.search, self.parts = search, search.parts(recipes)
        self.told, self.counted, self.total = search.notice, 0, len(recipes)
        self.is_searching = False
        search.notice = self._notice
        sharing = min(processes, processes_for(len(self.parts)))
        # Recipes of one part still have sizes to share.
        self.crew = Crew(_Share(search, processes, sharing == 1).do, sharing, search.notice)

    def __enter__(self) -> "Shares":
        return self

    def __exit__(self, *error: object) -> None:
        self.crew.__exit__(*error)

    def _notice(self, line: str) -> None:
        """Pass a line on, and while recipes are searched, how many are done."""
        if self.is_searching:
            self.counted += 1
            line = f"{self.counted} of {self.total} recipes; {line}"
        self.told(line)

    def rows(self) -> list[Row]:
        """The outcome of each recipe."""
        self.is_searching = True
        found: list[Row] = []
        for process, answer in self.crew.share([("searched", part) for part in self.parts]):
            found += [Row(outcome, process, small) for outcome, small in answer.rows]
            self._leave_out(answer.left_out)
        self.is_searching = False
        return found

    def confirmed(self, rows: Iterable[Row]) -> dict[Recipe, Row]:
        """Rows that fit, with the whole step traced as applied."""
        self.told("running the step of what fits as a whole")
        return self._changed("confirmed", rows)

    def at_last(self, rows: Iterable[Row]) -> dict[Recipe, Row]:
        """Rows that do not fit, with the levers of least memory."""
        self.told("trying the levers of least memory on what does not fit")
        return self._changed("at_last", rows)

    def streamed(self, rows: Iterable[Row]) -> dict[Recipe, Row]:
        """Rows that do not fit, with weights of blocks on the host."""
        self.told("trying to stream weights of what does not fit")
        return self._changed("streamed", rows)

    def sizes(
        self, rows: Iterable[Row], is_confirmed: Callable[[Row], bool]
    ) -> dict[Recipe, tuple[LargestSize | None, LargestSize | None]]:
        """The longest sequence and the largest batch of each row."""
        self.told("finding the longest sequences and the largest batches")
        wanted = _by_process(rows, lambda row: _Size(row.recipe, is_confirmed(row)))
        found: dict[Recipe, tuple[LargestSize | None, LargestSize | None]] = {}
        for answer in self.crew.ask({process: ("sized", each) for process, each in wanted.items()}).values():
            found |= answer.sizes
            self._leave_out(answer.left_out)
        return found

    def _leave_out(self, left: list[LeftOut]) -> None:
        """Keep what a process has left out; this one has kept its own already."""
        self.search.left_out += [each for each in left if each not in self.search.left_out]

    def _changed(self, method: str, rows: Iterable[Row]) -> dict[Recipe, Row]:
        wanted = _by_process(rows, lambda row: row.recipe)
        answers = self.crew.ask({process: (method, recipes) for process, recipes in wanted.items()})
        for answer in answers.values():
            self._leave_out(answer.left_out)
        return {
            outcome.recipe: Row(outcome, process, small)
            for process, answer in answers.items()
            for outcome, small in answer.rows
        }


def _by_process(rows: Iterable[Row], what: Callable[[Row], Any]) -> Mapping[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for row in rows:
        found.setdefault(row.process, []).append(what(row))
    return found


def _dry_runs(part: Sequence[_Size]) -> int:
    """About how many dry runs find the sizes of recipes of one variant."""
    return 4 + 4 * sum(each.confirm for each in part)
