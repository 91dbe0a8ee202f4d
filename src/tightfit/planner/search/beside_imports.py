"""Prices combinations in a fork while this process imports PyTorch's compiler, which takes seconds."""

from collections.abc import Callable, Sequence

from tightfit.planner.levers import Combination, Recompute, Role
from tightfit.planner.search.candidates import Baseline
from tightfit.planner.search.search import Search
from tightfit.runtime.forked import Crew, processes_for
from tightfit.runtime.internals import compiler_is_loaded, load_compiler

AT_MOST = 4  # combinations: about what is priced in the time of the imports
MOST_OPERATORS = 6000  # of a step: a longer one is priced for longer than the imports take, and some of it for nothing


def priced_beside_imports(
    search: Search, combinations: Sequence[Combination], baseline: Callable[[Combination], Baseline]
) -> dict[Combination, Baseline]:
    """The first of these combinations with their prices, where blocks may be compiled and the compiler is not loaded.

    Empty where that is not so, or where this process must not be forked.
    """
    if not search.of_role(Role.WHOLE_BLOCKS) or not search.request.may(Recompute) or compiler_is_loaded():
        return {}
    if not search.paths or len(search.plain.operators) > MOST_OPERATORS or processes_for(2) == 1:
        return {}
    first = combinations[:AT_MOST]

    def work(are_priced: bool, notice: object) -> list[Baseline]:
        if are_priced:
            return [baseline(combination) for combination in first]
        load_compiler()
        return []

    with Crew(work, 2, lambda line: None) as crew:
        return dict(zip(first, crew.ask({0: False, 1: True})[1], strict=True))
