"""Finds the largest batch, sequence or model that has a plan within a budget."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from tightfit.devices.present import lookup
from tightfit.errors import BudgetError, CannotFit, InputError
from tightfit.memory.allocator import old_objects_left_alone
from tightfit.names import LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES
from tightfit.planner.api import as_plan
from tightfit.planner.arguments import check_levers
from tightfit.planner.levers import MicroBatches, allowed_levers
from tightfit.planner.plans import Plan
from tightfit.planner.request import Request, lacking
from tightfit.planner.search.bisection import UNBOUNDED, certain_bound, rough_bound
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.fastest import Refusal, fastest
from tightfit.planner.search.least import LeastLevers, as_it_will_run, least_levers, peak_of, priced_levers
from tightfit.planner.search.search import Search
from tightfit.planner.step_figures import fingerprint
from tightfit.runtime.outside import outside_training
from tightfit.step import Batch
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import real_tensors
from tightfit.units import format_bytes, is_share_of, parse_budget

RECENT = 4  # searches kept with their traces: each stage asks again about numbers near the bound
ROUGHLY = 0.02  # of a value: how near the first bound is to its own, since traces of whole steps come after it
Notice = Callable[[str], None]
Case = Callable[[int], tuple[nn.Module, Batch]]


@dataclass(frozen=True)
class TooLarge:
    """The next value above the largest. Its least peak, `least_bytes`, exceeds the budget.

    If `taken_bytes` is set, the device is the limit instead: `taken_bytes` is what the step would use of it, with
    allocator and context.
    """

    value: int
    least_bytes: int
    taken_bytes: int | None = None


@dataclass(frozen=True)
class Largest:
    """The largest value of `what`, a multiple of `multiple_of`, for which there is a plan.

    `above` is the next value, which has no plan; None if `at_most` ended the search at the value itself. `tried` lists
    all values that were tried, in order. `planned` lists those that were planned in full.
    """

    what: str
    value: int
    multiple_of: int
    plan: Plan
    above: TooLarge | None
    tried: tuple[int, ...]
    planned: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.plan.to_dict()}

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.plan}"

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        budget = format_bytes(self.plan.budget_bytes)
        multiple = "" if self.multiple_of == 1 else f", as a multiple of {self.multiple_of},"
        line = f"The largest {self.what}{multiple} within {budget} is {self.value}"
        if self.above is None:
            return f"{line}: no larger one was allowed."
        least = f"{self.above.value} takes {format_bytes(self.above.least_bytes)} at least"
        if self.above.taken_bytes is None:
            return f"{line}: {least}."
        return (
            f"{line}: {least}, and with what the allocator reserves and the context "
            f"{format_bytes(self.above.taken_bytes)}, for which {self.plan.device} has no room."
        )


@outside_training()
@old_objects_left_alone()
@real_tensors()
def maximise(
    case: Case,
    budget: int | str,
    *,
    what: str = "value",
    multiple_of: int = 1,
    at_most: int | None = None,
    notice: Notice | None = None,
    **how: Any,
) -> Largest:
    """Find the largest value that has a plan within the budget, and return it with that plan.

    The search assumes that memory does not fall when the value rises, so it tries few values. Two results do not depend
    on that assumption: the value has a plan, and the next value has none. For `what="batch_size"` the search leaves out
    the lever `"micro_batch"`, because any batch fits in enough micro-batches.

    Args:
        case: `case(value)` returns the model and the batch for a value, for example `lambda n: (model, TokenBatch(4, n,
            32000))` for the longest sequence. A `case` that builds a model for each value should build it dry
            (`tightfit.build_dry`).
        budget: The largest peak of a step, in bytes or as text (`"22GiB"`, `"80%"`).
        what: The name of the value in messages.
        multiple_of: The search considers multiples of this number.
        at_most: The largest value to consider.
        notice: A function that is called with one line for each value that is tried.
        **how: The other arguments of `tightfit.plan`.

    Returns:
        The value, its plan, and the least peak of the next value.

    Raises:
        CannotFit: The smallest value does not fit.
        BudgetError: The budget depends on the value (`"0.5x"`).
        InputError: Every value would fit.

    Example:
        >>> import tightfit, torch
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> def loss(model, batch):
        ...     return model(*batch).square().mean()
        >>> def case(size):
        ...     return model, (torch.randn(size, 16),)
        >>> how = {"loss": loss, "levers": ["recompute"]}  # as for `plan`
        >>> largest = tightfit.maximise(case, "256KiB", what="batch_size", multiple_of=32, **how)
        >>> largest.plan.peak_bytes <= 256 * 1024 < largest.above.least_bytes
        True
    """
    refuse_moving(budget, what)
    how["device"] = device = lookup(how.get("device"))  # once, so that all values use the same figures of the device
    if what == "batch_size":
        how = without_micro_batches(how)
    top = _highest(multiple_of, at_most)
    limit = parse_budget(budget, device_bytes=device.memory_bytes)
    room = limit if is_share_of(budget, "%") else device.memory_bytes
    notice = notice or (lambda line: None)
    tried: list[int] = []
    measured: dict[int, int] = {}  # about the least peaks, by number
    plans: dict[int, Plan] = {}
    failures: dict[int, CannotFit] = {}
    refused: list[Refusal] = []  # the latest
    searches: dict[int, Search] = {}  # the latest few, with their traces; their blocks may be those of another batch
    plains: dict[str, tuple[StepTrace, list[str]]] = {}  # and the blocks, by fingerprint of the model

    def search_of(number: int) -> Search:
        """The search for a number: the value over `multiple_of`."""
        if number * multiple_of not in tried:
            tried.append(number * multiple_of)
        if number not in searches:
            made, batch = case(number * multiple_of)
            found = Search(Request.of(made, batch, **how).checked(may_choose=True), budget)
            _, found.known_paths = plains.get(fingerprint(made), (None, None))
            searches[number] = found
            for oldest in list(searches)[:-RECENT]:
                del searches[oldest]
        return searches[number]

    def plain_of(search: Search) -> StepTrace:
        # With the first batch that came: only its optimizer states and gradients are used, which depend on no batch.
        model = fingerprint(search.request.model)
        if model not in plains:
            plains[model] = search.plain, search.paths
        return plains[model][0]

    def excess(number: int, peak_bytes: int) -> int:
        """Bytes over the budget."""
        measured[number] = peak_bytes
        notice(f"{what} {number * multiple_of}: about {format_bytes(peak_bytes)} at least")
        return peak_bytes + UNSEEN_BYTES - limit

    def rough_excess(number: int) -> int:
        """Of the least peak without segments. The best segments are searched only once."""
        search = search_of(number)
        return excess(number, least_levers(search, plain_of(search), joining=False)[1])

    def excess_of_part(number: int, levers: LeastLevers) -> int:
        search = search_of(number)
        return excess(number, peak_of(search, plain_of(search), levers))

    def excess_as_it_will_run(number: int, levers: LeastLevers) -> int:
        trace = as_it_will_run(search_of(number), levers)
        over = excess(number, trace.peak_bytes)
        # On CUDA the tensors may fit the budget while the allocator's segments do not fit on the device.
        return over if over > 0 or trace.reserved_bytes is None else max(over, lacking(trace, room))

    def near() -> int:
        """The number near which to plan in full: from traces of forward and backward, then of whole steps nearby."""
        # A full plan of a 7B takes half a minute, so a search that climbs by plans takes minutes (notes/).
        guess = rough_bound(rough_excess, 0, top, near=ROUGHLY)
        search = search_of(max(guess, 1))
        levers, peak = least_levers(search, plain_of(search))
        if guess < top or levers.joined:
            levers, peak = priced_levers(search, plain_of(search), levers, peak)
        start, beside = max(guess, 1), None
        if levers.joined:  # segments need less memory, so larger numbers fit than the first bound says
            start = rough_bound(lambda number: excess_of_part(number, levers), 0, top, guess=start, near=ROUGHLY)
        elif guess < top:
            beside = start, peak + UNSEEN_BYTES - limit
            start = min(top, start + further(start, measured[start] - peak))
        if start == top:
            return top
        return rough_bound(
            lambda number: excess_as_it_will_run(number, levers), 0, top, guess=max(start, 1), beside=beside
        )

    def further(number: int, saved: int) -> int:
        """How many more than `number` fit into bytes that are saved of its peak, by the line through another number."""
        other = min((each for each in measured if each != number), key=lambda each: abs(each - number), default=number)
        rise = (measured[number] - measured[other]) / (number - other) if other != number else 0.0
        return int(saved / rise) if rise > 0 else 0

    def fits(number: int) -> bool:
        search = in_full(search_of(number))
        notice(f"{what} {number * multiple_of}: planned in full")
        try:
            plans[number] = as_plan(search, fastest(search))
        except CannotFit as error:
            failures[number] = error.with_traceback(None)  # it has this frame, which keeps the model
            refused[:] = [Refusal(search)]  # of 1 at last, if nothing fits
        return number in plans

    guess = near()
    if at_most is None and guess == top:
        raise InputError(f"any {what} fits: nothing grows with it; if that is so, bound it by at_most")
    found = certain_bound(fits, guess, top)
    if not found:
        least = failures[1]
        line = f"not even {what} {multiple_of} fits: {least}"
        raise CannotFit(line, least.least_bytes, refusal=refused[0])
    above = failures.get(found + 1)
    return Largest(
        what=what,
        value=found * multiple_of,
        multiple_of=multiple_of,
        plan=plans[found],
        above=None if above is None else TooLarge((found + 1) * multiple_of, above.least_bytes, above.taken_bytes),
        tried=tuple(tried),
        planned=tuple(number * multiple_of for number in (*plans, *failures)),
    )


def in_full(rough: Search) -> Search:
    """The search for the plan, with the traces of one whose blocks may be those of another batch."""
    found = Search(rough.request, rough.budget, known_plain=rough.known_plain, wholes=rough.wholes)
    if found.paths == rough.paths:
        found.priced |= rough.priced
    return found


def refuse_moving(budget: int | str, what: str) -> None:
    """Raise `BudgetError` for a budget that is a share of the plain peak."""
    if is_share_of(budget, "x"):
        raise BudgetError(
            f"budget {budget!r} is a share of the plain peak, which rises with the {what}: give bytes, for example "
            "8GiB, or a share of the device, 80%"
        )


def without_micro_batches(how: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a plan without the lever `"micro_batch"`. Raises `InputError` for `micro_batches="auto"`."""
    if how.get("micro_batches") == "auto":
        raise InputError(LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES.refusal())
    check_levers(how.get("levers"))
    return {**how, "levers": sorted(allowed_levers(how.get("levers")) - {MicroBatches.name})}


def _highest(multiple_of: int, at_most: int | None) -> int:
    """The largest number of multiples that the search may try."""
    if multiple_of < 1:
        raise InputError(f"multiple_of is {multiple_of}, wanted at least 1")
    if at_most is not None and at_most < multiple_of:
        raise InputError(f"at_most is {at_most}, wanted at least one multiple of {multiple_of}")
    return (UNBOUNDED if at_most is None else at_most) // multiple_of
