"""The largest batch, sequence or model for which there is a plan: the bound of what a budget can train."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from tightfit.devices.present import lookup
from tightfit.errors import BudgetError, CannotFit, InputError, LeverError
from tightfit.exclusions import LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES
from tightfit.levers.offload.lever import INPUTS_ONLY
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, Policy
from tightfit.levers.recompute.policy import OFFLOAD_ALL
from tightfit.planner.api import as_plan, make_search
from tightfit.planner.arguments import check_levers
from tightfit.planner.bisection import UNBOUNDED, certain_bound, rough_bound
from tightfit.planner.candidates import UNSEEN_BYTES
from tightfit.planner.plan import Plan
from tightfit.planner.request import allowed_levers, optimizer_peak
from tightfit.planner.search import Search
from tightfit.planner.variants import compiled_alike, tiled
from tightfit.step import Batch
from tightfit.units import format_bytes, is_share_of

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
    the values that were looked at, in order: by two dry runs each, and those in `planned` by a whole plan.
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


def maximise(
    case: Case, budget: int | str, *, what: str = "value", multiple_of: int = 1, at_most: int | None = None, **how: Any
) -> Largest:
    """The largest value for which there is a plan within the budget, and that plan.

    `case(value)` gives the model and the batch for a value, for example `lambda n: (model, TokenBatch(4, n, 32000))`
    for the longest sequence; a model that is built for each value is best built dry (`build_dry`). `what` names the
    value. Multiples of `multiple_of` are looked at, up to `at_most`. The other arguments are those of `plan`. For
    `what="batch_size"` the lever `"micro_batch"` is left out, since in enough micro-batches every batch fits.

    What a step holds is presumed not to fall when the value rises, so that few values need to be looked at; what is
    certain is the plan for the value, and that there is none for the next one. Raises `CannotFit` where the smallest
    value does not fit, `BudgetError` for a budget that moves with the value (`"0.5x"`), `InputError` where any value
    would fit.
    """
    refuse_moving(budget, what)
    how["device"] = lookup(how.get("device"))  # once: all values are planned by the same figures
    if what == "batch_size":
        how = without_micro_batches(how)
    top = _highest(multiple_of, at_most)
    ladder = _Ladder(case, budget, multiple_of, how)
    guess = rough_bound(ladder.rough_excess, 0, top)
    if at_most is None and guess == top:
        raise InputError(f"any {what} fits: nothing grows with it; if that is so, bound it by at_most")
    found = certain_bound(ladder.fits, guess, top)
    if not found:
        least = ladder.failures[1]
        raise CannotFit(f"not even {what} {multiple_of} fits: {least}", least.least_bytes)
    above = ladder.failures.get(found + 1)
    return Largest(
        what=what,
        value=found * multiple_of,
        multiple_of=multiple_of,
        plan=ladder.plans[found],
        above=None if above is None else TooLarge((found + 1) * multiple_of, above.least_bytes, above.taken_bytes),
        tried=tuple(ladder.tried),
        planned=tuple(number * multiple_of for number in (*ladder.plans, *ladder.failures)),
    )


@dataclass
class _Ladder:
    """Mutable: the questions asked so far, by the number of the multiple."""

    case: Case
    budget: int | str
    multiple_of: int
    how: Mapping[str, Any]
    tried: list[int] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    failures: dict[int, CannotFit] = field(default_factory=dict)

    def search(self, number: int) -> Search:
        value = number * self.multiple_of
        if value not in self.tried:
            self.tried.append(value)
        model, batch = self.case(value)
        return make_search(model, batch, self.budget, **self.how)

    def rough_excess(self, number: int) -> int:
        search = self.search(number)
        return rough_least(search) - search.budget_bytes

    def fits(self, number: int) -> bool:
        search = self.search(number)
        try:
            self.plans[number] = as_plan(search, search.run())
        except CannotFit as error:
            self.failures[number] = error
        return number in self.plans


def rough_least(search: Search) -> int:
    """About the least budget that can be met, from few dry runs; what is true, `Search.run` tells."""
    plain = search.plain.peak_bytes
    if plain + UNSEEN_BYTES <= search.budget_bytes:
        return plain + UNSEEN_BYTES
    frugal = search.combinations()[-1]
    policies = dict.fromkeys(search.paths, frugal_policy(search.request.levers))
    levers = search.request.levers
    if "compile" in levers and search.paths and not levers & {"recompute", "offload"}:
        frugal, policies = compiled_alike(frugal, search.paths)[-1], {}
    peak = search.tracer.part(frugal, policies, search.plain).peak_bytes
    least_tiles = tiled(replace(frugal, compiled=None), search.request, search.plain, search.paths)[-1:]
    for combination in least_tiles if "tile" in levers else []:
        with suppress(LeverError):  # a module that cannot be tiled
            peak = min(peak, search.tracer.part(combination, policies, search.plain).peak_bytes)
    return max(peak, optimizer_peak(search.plain)) + UNSEEN_BYTES


def frugal_policy(levers: frozenset[str]) -> Policy:
    """What a block does at about its least."""
    if "offload" in levers:
        return INPUTS_ONLY if "recompute" in levers else OFFLOAD_ALL
    return RECOMPUTE_ALL if "recompute" in levers else KEEP_ALL


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
    return {**how, "levers": sorted(allowed_levers(how.get("levers")) - {"micro_batch"})}


def _highest(multiple_of: int, at_most: int | None) -> int:
    """The number of multiples to look at."""
    if multiple_of < 1:
        raise InputError(f"multiple_of is {multiple_of}, wanted at least 1")
    if at_most is not None and at_most < multiple_of:
        raise InputError(f"at_most is {at_most}, wanted at least one multiple of {multiple_of}")
    return (UNBOUNDED if at_most is None else at_most) // multiple_of
