"""Ways out where a step does not fit, and the doctor's remedies, as plain data. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from tightfit.errors import InputError
from tightfit.planner.levers import Exactness
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.planner.plans import Plan
    from tightfit.planner.request import Request

Kind = Literal["exact", "rounding", "inexact", "size", "cards", "device"]
KINDS: tuple[Kind, ...] = ("exact", "rounding", "inexact", "size", "cards", "device")  # as ways out are ranked


@dataclass(frozen=True)
class Remedy:
    """A way to need less memory, with the line to add.

    The figures come from a new dry run of the step with the remedy. They are None without model and batch. `exactness`
    says how results change: "exact", "rounding" or "inexact".
    """

    name: str
    exactness: str
    python: str
    yaml: str
    saved_bytes: int | None = None
    added_seconds: float | None = None  # per step; negative if the step is faster
    peak_bytes: int | None = None
    fits: bool | None = None  # in the memory that was available; None if that is unknown


@dataclass(frozen=True)
class WayOut:
    """A way to train where a step does not fit, with the lines that take it. Bytes are ints.

    `kind` is how it is ranked: the results stay the same bits, to rounding, or not; another size of the batch; more
    cards; another device. `changes` says that in words. `peak_bytes` is the peak of a dry run with the way and `levers`
    applied, and `needed_bytes` the smallest budget for that step. A way that does not fit has the least peak that was
    found. `budget` is the budget of the way's plan.
    """

    name: str
    kind: Kind
    changes: str
    fits: bool
    peak_bytes: int
    needed_bytes: int
    step_seconds: float
    levers: str
    python: str
    yaml: str
    flags: str
    overrides: str = ""  # of a configuration, as `key=value`; none takes another device
    budget: int | str = 0
    asked: "Request | None" = field(default=None, repr=False, compare=False)  # the arguments of its plan

    @property
    def exactness(self) -> str:
        """The exactness of the loss and the gradients of this step: "exact", "rounding" or "inexact"."""
        return self.kind if self.kind in ("exact", "rounding") else str(Exactness.INEXACT)

    def plan(self) -> "Plan":
        """The fastest plan with this way, for a model that is changed as `python` says.

        Raises `InputError` for a way from another process, which has no model, and `CannotFit` for one that does not
        fit.
        """
        from tightfit.planner.api import plan_asked

        if self.asked is None:
            raise InputError(f"{self.name}: this way out comes from another process and has no model: plan it there")
        return plan_asked(self.asked, self.budget)

    def to_dict(self) -> dict[str, Any]:
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "asked"}
        return {**shown, "exactness": self.exactness}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "asked": None}  # models stay where they are


@dataclass(frozen=True)
class WaysOut(Sequence[WayOut]):
    """The ways out of one refusal: those that fit, ranked; then those that were tried and do not.

    `budget_bytes` is the budget that was refused. `notes` are sentences about ways that could not be tried.
    """

    ways: tuple[WayOut, ...] = ()
    budget_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ways)

    def __getitem__(self, index: Any) -> Any:
        return self.ways[index]

    def __iter__(self) -> Iterator[WayOut]:
        return iter(self.ways)

    @property
    def fitting(self) -> tuple[WayOut, ...]:
        """Those that fit, ranked."""
        return tuple(way for way in self.ways if way.fits)

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        here = [way for way in self.fitting if way.kind != "device"]
        if here:
            return f"Ways out within {format_bytes(self.budget_bytes)}, each run dry:"
        if self.fitting:
            return f"Nothing fits {format_bytes(self.budget_bytes)}, with any recipe. The smallest card that would do:"
        if not self.ways:
            return ""
        least = min(self.ways, key=lambda way: way.needed_bytes)
        return (
            f"Nothing fits {format_bytes(self.budget_bytes)}, with any recipe, and no card of the list has room: the "
            f"least is {format_bytes(least.needed_bytes)}, with {least.name}."
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "ways_out": [way.to_dict() for way in self.ways],
            "budget_bytes": self.budget_bytes,
            "notes": list(self.notes),
        }


def ranked(ways: Sequence[WayOut]) -> tuple[WayOut, ...]:
    """The ways, those that fit first, by kind and in the order in which they were found; then the rest by bytes."""
    fitting = sorted((way for way in ways if way.fits), key=lambda way: KINDS.index(way.kind))
    return (*fitting, *sorted((way for way in ways if not way.fits), key=lambda way: way.needed_bytes))
