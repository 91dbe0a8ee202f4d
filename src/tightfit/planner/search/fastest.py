"""Finds the fastest combination of levers whose true peak is within the budget.

Some levers concern the whole step (micro-batches, chunked loss). For each combination of these, the search solves the
choices inside blocks exactly. It tries the combinations with the fewest micro-batches first. It does not solve a
combination whose step is slower than the best plan even without recomputation. Each solution is traced as applied. If
that trace exceeds the budget, the search lowers the bound by the excess and solves again.
"""

import itertools

from tightfit.planner.levers import Combination, lever_types
from tightfit.planner.records import Rejected
from tightfit.planner.search.beside_imports import priced_beside_imports
from tightfit.planner.search.candidates import Candidate
from tightfit.planner.search.capturing import capture_blocks
from tightfit.planner.search.last_resorts import join_segments, try_last_resorts
from tightfit.planner.search.refusing import cannot_fit
from tightfit.planner.search.search import Search
from tightfit.planner.search.streaming import stream_blocks
from tightfit.planner.search.whole_blocks import compile_blocks


def fastest(search: Search) -> Candidate:
    """The fastest candidate within the budget. Raises `CannotFit` with the least peak found."""
    plain = search.request.plain
    routed = search.tracer.routed_peaks(search.plain, plain, {})
    # One peak means that routing changed no level of the plain step. Candidates then need no traces per routing.
    search.routing_matters = len(routed) > 1
    search.consider(Candidate(plain, {}, (), search.plain, worst_bytes=max(routed, default=None)), "no lever")
    if search.best is None:
        reject_forbidden(search)
        solve_combinations(search)
        stream_blocks(search)
    elif search.request.compiles:
        solve_below_plain(search)
    capture_blocks(search)
    if search.best is None and search.resorts:
        try_last_resorts(search)
    if search.best is None and search.resorts:
        join_segments(search)
    if search.best is None:
        raise cannot_fit(search)
    return search.best


def solve_combinations(search: Search) -> None:
    """Solve every combination. With `fewest_micro_batches`, stop at the first number of micro-batches that fits."""
    waiting: list[Combination] = []  # solved, but not yet tried with compiled blocks
    combinations = search.combinations()
    search.priced |= priced_beside_imports(search, combinations, search.baseline)
    for _, alike in itertools.groupby(combinations, key=lambda combination: combination.micro_batches):
        for combination in alike:
            search.solve_blocks(combination)
            waiting.append(combination)
        # `micro_batches="auto"` promises the largest micro-batch that fits, even if smaller ones run faster.
        if search.request.fewest_micro_batches:
            compile_blocks(search, waiting)
            waiting = []
            if search.best is not None:
                return
    compile_blocks(search, waiting)


def solve_below_plain(search: Search) -> None:
    """Solve every combination within the plain peak. Within more, plain blocks are the cheapest that is guessed."""
    budget_bytes = search.budget_bytes
    search.limit_bytes = min(budget_bytes, search.plain.peak_bytes)
    solve_combinations(search)
    search.limit_bytes = budget_bytes


def reject_forbidden(search: Search) -> None:
    """Record which levers were not allowed, and which have nothing to work on in this model."""
    for kind in lever_types():
        if not search.request.may(kind):
            why = None if kind.on_request else "not among the levers that were allowed"
        else:
            why = kind.why_not(search.step())
        if why is not None:
            search.rejected.append(Rejected(kind.title, why))
