"""The largest batch, sequence or model for which there is a plan: the bound of what a budget can train."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tightfit.devices.present import lookup
from tightfit.errors import BudgetError, CannotFit, InputError
from tightfit.names.exclusions import LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES
from tightfit.planner.api import as_plan
from tightfit.planner.arguments import check_levers
from tightfit.planner.asked import Asked
from tightfit.planner.levers import MicroBatches, allowed_levers
from tightfit.planner.plans import Plan
from tightfit.planner.request import lacking
from tightfit.planner.search.bisection import UNBOUNDED, certain_bound, rough_bound
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.least import Way, as_it_will_run, least_way, peak_of
from tightfit.planner.search.search import Search
from tightfit.planner.step_figures import fingerprint
from tightfit.runtime.activity import aside
from tightfit.step import Batch
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import real_tensors
from tightfit.units import format_bytes, is_share_of, parse_budget

RECENT = 4  # searches that are kept: those around the bound are asked again, in more detail
Notice = Callable[[str], None]
Case = Callable[[int], tuple[nn.Module, Batch]]


@dataclass(frozen=True)
class TooLarge:
    """The next value above the largest: the least that it needs is over the budget; or, where `taken_bytes` is given,
    the device has no room for what the step takes of it as a whole, allocator and context included.
    """

    value: int
    least_bytes: int
    taken_bytes: int | None = None


@dataclass(frozen=True)
class Largest:
    """The largest value of `what`, a multiple of `multiple_of`, for which there is a plan.

    `above` is the next one, for which there is none; None where the search was bounded at the value itself. `tried` are
    the values that were looked at, in order: by single dry runs, and those in `planned` by a whole plan.
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


@aside()
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
    """The largest value for which there is a plan within the budget, and that plan.

    `case(value)` gives the model and the batch for a value, for example `lambda n: (model, TokenBatch(4, n, 32000))`
    for the longest sequence; a model that is built for each value is best built dry (`build_dry`). `what` names the
    value. Multiples of `multiple_of` are looked at, up to `at_most`. `notice` is told in a line which value is looked
    at. The other arguments are those of `plan`. For `what="batch_size"` the lever `"micro_batch"` is left out, since in
    enough micro-batches every batch fits.

    What a step holds is assumed not to fall when the value rises, so that few values need to be looked at; what is
    certain is the plan for the value, and that there is none for the next one. Raises `CannotFit` where the smallest
    value does not fit, `BudgetError` for a budget that moves with the value (`"0.5x"`), `InputError` where any value
    would fit.

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
    how["device"] = device = lookup(how.get("device"))  # once: all values are planned by the same figures
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
        raise CannotFit(f"not even {what} {multiple_of} fits: {least}", least.least_bytes)
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
    """Mutable: the questions asked so far, by the number of the multiple; from the cheap ones to the certain ones."""

    case: Case
    budget: int | str
    limit_bytes: int  # the budget
    room_bytes: int  # what allocator and context may take of a CUDA device
    multiple_of: int
    how: Mapping[str, Any]
    what: str
    notice: Notice
    tried: list[int] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    failures: dict[int, CannotFit] = field(default_factory=dict)
    recent: dict[int, Search] = field(default_factory=dict)
    plain: dict[str, StepTrace] = field(default_factory=dict)  # a plain step of each model, by its fingerprint

    def guess(self, top: int) -> int:
        """The number about which plans are to be asked: by single parts of a step first, by whole steps near there."""
        guess = rough_bound(self.rough_excess, 0, top)
        number = max(guess, 1)
        search = self.search(number)
        way, _ = least_way(search, self.plain_of(search))
        if way.joined:  # segments reach further
            guess = rough_bound(lambda n: self.excess_of_part(n, way), 0, top, guess=number)
        if guess == top:
            return top
        return rough_bound(lambda n: self.excess_as_it_will_run(n, way), 0, top, guess=max(guess, 1))

    def search(self, number: int) -> Search:
        """A search for a number; the latest few are kept, with what they have traced."""
        value = number * self.multiple_of
        if value not in self.tried:
            self.tried.append(value)
        if number not in self.recent:
            model, batch = self.case(value)
            request = Asked(model, batch, **self.how).request(may_choose=True)
            self.recent[number] = Search(request, self.budget)
            for oldest in list(self.recent)[:-RECENT]:
                del self.recent[oldest]
        return self.recent[number]

    def plain_of(self, search: Search) -> StepTrace:
        """A plain step of the search's model, with whichever batch it was traced first: states and gradients are the
        same for all.
        """
        model = fingerprint(search.request.model)
        if model not in self.plain:
            self.plain[model] = search.plain
        return self.plain[model]

    def rough_excess(self, number: int) -> int:
        """By a way without segments: which are best, is asked once."""
        search = self.search(number)
        plain = self.plain_of(search)
        return self._excess(number, least_way(search, plain, joining=False)[1])

    def excess_of_part(self, number: int, way: Way) -> int:
        search = self.search(number)
        return self._excess(number, peak_of(search, self.plain_of(search), way))

    def excess_as_it_will_run(self, number: int, way: Way) -> int:
        trace = as_it_will_run(self.search(number), way)
        over = self._excess(number, trace.peak_bytes)
        return over if over > 0 or trace.reserved_bytes is None else max(over, lacking(trace, self.room_bytes))

    def _excess(self, number: int, peak_bytes: int) -> int:
        self.notice(f"{self.what} {number * self.multiple_of}: about {format_bytes(peak_bytes)} at least")
        return peak_bytes + UNSEEN_BYTES - self.limit_bytes

    def fits(self, number: int) -> bool:
        search = self.search(number)
        self.notice(f"{self.what} {number * self.multiple_of}: planned in full")
        try:
            self.plans[number] = as_plan(search, search.run())
        except CannotFit as error:
            self.failures[number] = error
        return number in self.plans


def _say_nothing(line: str) -> None:
    """Nobody asked to be told."""


def refuse_moving(budget: int | str, what: str) -> None:
    """Raises `BudgetError` for a share of the plain peak."""
    if is_share_of(budget, "x"):
        raise BudgetError(
            f"budget {budget!r} is a share of the plain peak, which rises with the {what}: give bytes, for example "
            "8GiB, or a share of the device, 80%"
        )


def without_micro_batches(how: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a plan, the lever `"micro_batch"` left out. Raises `InputError` where it is asked for."""
    if how.get("micro_batches") == "auto":
        raise InputError(LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES.refusal())
    check_levers(how.get("levers"))
    return {**how, "levers": sorted(allowed_levers(how.get("levers")) - {MicroBatches.name})}


def _highest(multiple_of: int, at_most: int | None) -> int:
    """The number of multiples to look at."""
    if multiple_of < 1:
        raise InputError(f"multiple_of is {multiple_of}, wanted at least 1")
    if at_most is not None and at_most < multiple_of:
        raise InputError(f"at_most is {at_most}, wanted at least one multiple of {multiple_of}")
    return (UNBOUNDED if at_most is None else at_most) // multiple_of
