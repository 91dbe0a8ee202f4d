"""Finds the largest batch, sequence or model that has a plan within a budget."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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
from tightfit.planner.search.least import LeastLevers, as_it_will_run, least_levers, peak_of
from tightfit.planner.search.search import Search
from tightfit.planner.step_figures import fingerprint
from tightfit.runtime.outside import outside_training
from tightfit.step import Batch
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import real_tensors
from tightfit.units import format_bytes, is_share_of, parse_budget

RECENT = 4  # searches kept with their traces: each stage asks again about numbers near the bound
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
    size_search = _SizeSearch(case, budget, limit, room, multiple_of, how, what, notice or _say_nothing)
    guess = size_search.guess(top)
    if at_most is None and guess == top:
        raise InputError(f"any {what} fits: nothing grows with it; if that is so, bound it by at_most")
    found = certain_bound(size_search.fits, guess, top)
    if not found:
        least = size_search.failures[1]
        line = f"not even {what} {multiple_of} fits: {least}"
        raise CannotFit(line, least.least_bytes, refusal=size_search.refusal(1))
    above = size_search.failures.get(found + 1)
    return Largest(
        what=what,
        value=found * multiple_of,
        multiple_of=multiple_of,
        plan=size_search.plans[found],
        above=None if above is None else TooLarge((found + 1) * multiple_of, above.least_bytes, above.taken_bytes),
        tried=tuple(size_search.tried),
        planned=tuple(number * multiple_of for number in (*size_search.plans, *size_search.failures)),
    )


@dataclass
class _SizeSearch:
    """Mutable: the dry runs and plans made so far, by number (value / `multiple_of`).

    The methods go from cheap, approximate measures to a full plan.
    """

    case: Case
    budget: int | str
    limit_bytes: int  # the budget
    room_bytes: int  # bytes of a CUDA device that allocator and context may use
    multiple_of: int
    how: Mapping[str, Any]
    what: str
    notice: Notice
    tried: list[int] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    failures: dict[int, CannotFit] = field(default_factory=dict)
    recent: dict[int, Search] = field(default_factory=dict)
    plain: dict[str, StepTrace] = field(default_factory=dict)  # one plain step of each model, by fingerprint

    def guess(self, top: int) -> int:
        """The number near which to plan in full: from traces of forward and backward, then of whole steps nearby."""
        # A full plan of a 7B takes half a minute, so a search that climbs by plans takes minutes (notes/).
        guess = rough_bound(self.rough_excess, 0, top)
        number = max(guess, 1)
        search = self.search(number)
        levers, _ = least_levers(search, self.plain_of(search))
        if levers.joined:  # segments need less memory, so larger numbers fit than the first bound says
            guess = rough_bound(lambda n: self.excess_of_part(n, levers), 0, top, guess=number)
        if guess == top:
            return top
        return rough_bound(lambda n: self.excess_as_it_will_run(n, levers), 0, top, guess=max(guess, 1))

    def search(self, number: int) -> Search:
        """The search for a number. The latest few are kept with their traces."""
        value = number * self.multiple_of
        if value not in self.tried:
            self.tried.append(value)
        if number not in self.recent:
            model, batch = self.case(value)
            request = Request.of(model, batch, **self.how).checked(may_choose=True)
            self.recent[number] = Search(request, self.budget)
            for oldest in list(self.recent)[:-RECENT]:
                del self.recent[oldest]
        return self.recent[number]

    def plain_of(self, search: Search) -> StepTrace:
        """A plain step of the search's model, traced with the first batch that came.

        Only its optimizer states and gradients are used, which do not depend on the batch.
        """
        model = fingerprint(search.request.model)
        if model not in self.plain:
            self.plain[model] = search.plain
        return self.plain[model]

    def refusal(self, number: int) -> Refusal:
        """The request and the search of a number that was planned in full."""
        return Refusal(self.search(number))

    def rough_excess(self, number: int) -> int:
        """Bytes over the budget with the least peak without segments. The best segments are searched only once."""
        search = self.search(number)
        plain = self.plain_of(search)
        return self._excess(number, least_levers(search, plain, joining=False)[1])

    def excess_of_part(self, number: int, levers: LeastLevers) -> int:
        search = self.search(number)
        return self._excess(number, peak_of(search, self.plain_of(search), levers))

    def excess_as_it_will_run(self, number: int, levers: LeastLevers) -> int:
        trace = as_it_will_run(self.search(number), levers)
        over = self._excess(number, trace.peak_bytes)
        # On CUDA the tensors may fit the budget while the allocator's segments do not fit on the device.
        return over if over > 0 or trace.reserved_bytes is None else max(over, lacking(trace, self.room_bytes))

    def _excess(self, number: int, peak_bytes: int) -> int:
        self.notice(f"{self.what} {number * self.multiple_of}: about {format_bytes(peak_bytes)} at least")
        return peak_bytes + UNSEEN_BYTES - self.limit_bytes

    def fits(self, number: int) -> bool:
        search = self.search(number)
        self.notice(f"{self.what} {number * self.multiple_of}: planned in full")
        try:
            self.plans[number] = as_plan(search, fastest(search))
        except CannotFit as error:
            self.failures[number] = error
        return number in self.plans


def _say_nothing(line: str) -> None:
    """The default `notice`."""


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
