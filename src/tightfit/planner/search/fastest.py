"""Finds the fastest combination of levers whose true peak is within the budget.

Some levers concern the whole step (micro-batches, chunked loss). For each combination of these, the search solves the
choices inside blocks exactly. It tries the combinations with the fewest micro-batches first. It does not solve a
combination whose step is slower than the best plan even without recomputation. Each solution is traced as applied. If
that trace exceeds the budget, the search lowers the bound by the excess and solves again.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tightfit.errors import CannotFit
from tightfit.planner.blocks.find import modules_left_out
from tightfit.planner.levers import Combination, MicroBatches, Offload, Recompute, Role, lever_types
from tightfit.planner.records import Rejected
from tightfit.planner.search.candidates import Baseline, Candidate
from tightfit.planner.search.capturing import capture_blocks
from tightfit.planner.search.last_resorts import join_segments, try_last_resorts
from tightfit.planner.search.search import Search
from tightfit.planner.search.streaming import stream_blocks
from tightfit.planner.search.whole_blocks import compile_blocks
from tightfit.runtime.forked import Crew, processes_for
from tightfit.runtime.internals import compiler_is_loaded, load_compiler
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.units import format_bytes

AT_MOST = 4  # combinations that are priced beside imports: about what is priced in their time
MOST_OPERATORS = 6000  # of a step: a longer one is priced for longer than the imports take, and some of it for nothing


@dataclass(frozen=True)
class Refusal:
    """The search of the plan that was refused, with its request and the traces that were made.

    `recipes_tried` says that other recipes were tried already, so only another device is left. `taken_by` says how a
    way out is taken: by options of the command, by overrides of the configuration that asked, or by nothing that the
    command has. A configuration may have no key for the dtype of the weights (`may_convert`), and nothing to adapt
    (`may_adapt`).
    """

    search: Search
    recipes_tried: bool = False
    taken_by: Literal["options", "overrides", "nothing"] = "options"
    may_convert: bool = True
    may_adapt: bool = True


def fastest(search: Search) -> Candidate:
    """The fastest candidate within the budget. Raises `CannotFit` with the least peak found."""
    plain = search.request.plain
    routed = search.tracer.routed_peaks(search.plain, plain, {})
    # One peak means that routing changed no level of the plain step. Candidates then need no traces per routing.
    search.routing_matters = len(routed) > 1
    search.consider(Candidate(plain, {}, (), search.plain, worst_bytes=max(routed, default=None)), "no lever")
    if search.best is None:
        reject_forbidden(search)
        if not search.is_held_by_update:
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
    search.priced |= priced_beside_imports(search, combinations)
    for _, alike in itertools.groupby(combinations, key=lambda combination: combination.micro_batches):
        for combination in alike:
            if search.is_held_by_update:
                return
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


def priced_beside_imports(search: Search, combinations: Sequence[Combination]) -> dict[Combination, Baseline]:
    """The first of these combinations with their prices, where blocks may be compiled and the compiler is not loaded.

    They are priced in a fork while this process imports PyTorch's compiler, which takes seconds. Empty where that is
    not so, or where this process must not be forked.
    """
    if not search.of_role(Role.WHOLE_BLOCKS) or not search.request.may(Recompute) or compiler_is_loaded():
        return {}
    if not search.paths or len(search.plain.operators) > MOST_OPERATORS or processes_for(2) == 1:
        return {}
    first = combinations[:AT_MOST]

    def work(are_priced: bool, notice: object) -> list[Baseline]:
        if are_priced:
            return [search.baseline(combination) for combination in first]
        load_compiler()
        return []

    with Crew(work, 2, lambda line: None) as crew:
        return dict(zip(first, crew.ask({0: False, 1: True})[1], strict=True))


def cannot_fit(search: Search) -> CannotFit:
    """The error of a search in which nothing fits: the least, what holds it up, and what bounds it."""
    assert search.least is not None, "the plain step was traced"
    least, trace = search.least, search.least.trace
    holds = max(trace.by_category().items(), key=lambda item: item[1])
    device = search.request.device
    limit, taken = f"{format_bytes(search.budget_bytes)} cannot fit", None
    if least.needed_bytes <= search.budget_bytes:  # tensors fit the budget, so the device's memory is the limit
        taken = (trace.reserved_bytes or 0) + CONTEXT_BYTES
        limit = (
            f"the step cannot fit {device.name}: with what the allocator reserves and the context it takes "
            f"{format_bytes(taken)} of {format_bytes(search.device_bytes)}"
        )
    return CannotFit(
        f"{limit}: the least is {format_bytes(least.needed_bytes)} "
        f"({least.needed_bytes} bytes), reached by {search.in_words(least)}; it is held up in "
        f"{trace.peak_operator.phase} at {trace.peak_operator.module or 'the top level'} "
        f"by {format_bytes(holds[1])} of {holds[0]}{offload_bound(search)}{no_micro_batches(search)}"
        f"{blocks_left_out(search)}",
        least.needed_bytes,
        taken,
    )


def no_micro_batches(search: Search) -> str:
    """Why the batch may not be split, for the message; empty if it may, or if nobody allowed it."""
    refusal = search.request.separation.refusal if search.request.may(MicroBatches) else None
    return "" if refusal is None else f"; {MicroBatches.title} is left out: {refusal}"


def blocks_left_out(search: Search) -> str:
    """Why blocks stay as they are, for the message; empty if all may change, or if no allowed lever changes blocks."""
    found = modules_left_out(search.plain) if any(kind.needs_blocks for kind in search.kinds) else {}
    reasons = Counter(found.values())
    return "".join(f"; blocks are left out where {why} (modules: {count})" for why, count in reasons.items())


def offload_bound(search: Search) -> str:
    """The user's own limit for offload, for the message; empty if there is none."""
    allowed = search.request.offload.budget_bytes
    if not search.request.may(Offload) or allowed is None:
        return ""
    return f"; offload may take {format_bytes(allowed)} (offload_budget)"
