"""What a lever is: one frozen dataclass that knows its name, its exactness, its settings, its words and its JSON.

Everything that lists levers derives from the registered types: the YAML schema, the command line's help, the rows that
say "not allowed", the search, `verify`, the doctor and the documentation. No torch here: a lever's file imports what
computes when the lever is asked for it.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from tightfit.errors import InputError
from tightfit.names.exclusions import Exclusion

if TYPE_CHECKING:
    from torch import nn

    from tightfit.devices.spec import DeviceSpec
    from tightfit.levers.handle import Removable
    from tightfit.levers.recompute import OperatorKey, Policy
    from tightfit.planner.records import BlockChoice
    from tightfit.step import Batch
    from tightfit.tracing.record import StepTrace

ROUNDING_SPREAD = 1.02  # sums in another order move the error of the gradients against fp64 by so much


class Exactness(enum.StrEnum):
    """What a lever changes in the loss and the gradients: nothing; the order of sums; or more than that."""

    EXACT = "exact"
    ROUNDING = "rounding"
    INEXACT = "inexact"


class Role(enum.Enum):
    """How a search uses a lever."""

    INSIDE_BLOCKS = "inside blocks"  # decided for each operator of each block, and solved exactly
    COMBINED = "combined"  # each of its settings with each of the others'
    WHOLE_BLOCKS = "whole blocks"  # in the place of what is decided inside blocks, the fastest setting first
    LAST = "last"  # where nothing else fits


@dataclass(frozen=True)
class PlainStep:
    """The step without levers, as a lever sees it that is asked for its settings.

    `blocks` are the paths of the repeated blocks, `trace` the dry run of the whole step, `micro_batches` the number in
    which the caller accumulates anyway, `size` the sequences of the batch.
    """

    model: "nn.Module"
    batch: "Batch"
    trace: "StepTrace"
    blocks: tuple[str, ...]
    micro_batches: int
    size: int


@dataclass(frozen=True)
class Choice:
    """One way to run the blocks of a kind: what becomes of each operator's output, and the seconds of recomputing."""

    policy: "Policy"
    seconds: float


class KeptOutputs(Protocol):
    """A set of operators of a block whose outputs stay until backward, by their places, and the cost of the rest."""

    @property
    def kept(self) -> frozenset[int]: ...

    @property
    def replay_seconds(self) -> float: ...


class Block(Protocol):
    """A kind of block, as a lever sees it that works inside blocks."""

    def keep_sets(self, limit: int) -> Sequence[KeptOutputs]:
        """Sets worth keeping, from everything to nothing: about `limit` by their price, and the least at any price."""
        ...

    def keys(self, places: frozenset[int]) -> "frozenset[OperatorKey]":
        """The operators at these places."""
        ...

    def pinned(self, places: frozenset[int]) -> frozenset[int]:
        """Those of these places whose outputs are small, or held in any case."""
        ...


@dataclass(frozen=True)
class Offer:
    """A way to take a lever up, for somebody who looks for less memory: in words, as a line of Python and as one of
    YAML.

    `lever` is set for the whole step, `inside` is what every block does; `BUDGET` in the lines stands for the peak that
    is reached.
    """

    name: str
    python: str
    yaml: str
    lever: "Lever | None" = None
    inside: "Policy | None" = None


@dataclass(frozen=True)
class Lever:
    """A lever as it is set. A subclass is a lever; its fields are the setting.

    `name` is how users and files name it, `title` how tables do, `summary` what it does. `spread` is the factor by
    which a lever that is exact to rounding may move the error of the gradients against fp64; `bound` the largest
    relative error of the gradients that an inexact one admits. One that is `on_request` is used only where it is named,
    since it takes something else than memory and time. `excludes` are settings that it does not go with.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    exactness: ClassVar[Exactness]
    role: ClassVar[Role] = Role.COMBINED
    spread: ClassVar[float] = ROUNDING_SPREAD
    bound: ClassVar[float] = 0.0
    on_request: ClassVar[bool] = False
    needs_blocks: ClassVar[bool] = False
    excludes: ClassVar[tuple[Exclusion, ...]] = ()

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        """What the lever can be set to in this step, the fastest first; none where it has nothing to work on."""
        raise NotImplementedError  # each lever has its own

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        """Why the lever has no setting in this step, where that is worth a line in the plan."""
        return None

    @classmethod
    def options(cls, block: Block, allowed: frozenset[str]) -> Sequence[Choice]:
        """The ways to run a block with this lever, where those named in `allowed` may be used. Only levers that work
        inside blocks have them.
        """
        raise NotImplementedError  # only levers that work inside blocks have options

    @classmethod
    def frugal_policy(cls, allowed: frozenset[str]) -> "Policy":
        """What a block does at about its least with this lever, where those named in `allowed` may be used."""
        raise NotImplementedError  # only levers that work inside blocks have one

    @classmethod
    def refusal(cls, device: "DeviceSpec") -> str | None:
        """Why the lever cannot be used in a plan for the device; None where it can."""
        return None

    def apply(self, model: "nn.Module") -> "Removable | None":
        """Put the lever on a model; the handle takes it off. None for one that is not put on modules."""
        raise NotImplementedError  # each lever has its own

    def mixed(self, higher: Self, last: int) -> Self:
        """This setting, but for the `last` blocks, whose backward comes first: they take the `higher` one. Only levers
        that take whole blocks have it.
        """
        raise NotImplementedError  # only levers that take whole blocks can be mixed

    def sentence(self, choices: Sequence["BlockChoice"]) -> str:
        """What the lever does in a plan with these choices inside blocks, for tables and pages."""
        raise NotImplementedError  # each lever has its own

    @classmethod
    def offers(cls, step: PlainStep) -> Sequence[Offer]:
        """Ways to take the lever up in this step: its fastest setting, in a plan that may use nothing else."""
        python = f'tightfit.plan(model, batch, "BUDGET", levers=["{cls.name}"]).apply(model)'
        yaml = f"memory: {{budget: BUDGET, levers: [{cls.name}]}}"
        return [Offer(str(setting), python, yaml, lever=setting) for setting in cls.settings(step)[:1]]

    def to_dict(self) -> dict[str, Any]:
        """The lever as JSON."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The lever of a JSON mapping, without its `name`."""
        return cls(**raw)


LeverType = TypeVar("LeverType", bound=type[Lever])
L = TypeVar("L", bound=Lever)

_REGISTERED: dict[str, type[Lever]] = {}


def register(kind: LeverType) -> LeverType:
    """Make a type of lever known, by its name; a class decorator. Raises `ValueError` for a name that is taken."""
    if kind.name in (*_REGISTERED, *CLASSES):
        raise ValueError(f"there is a lever {kind.name!r} already")
    _REGISTERED[kind.name] = kind
    return kind


def forget(name: str) -> None:
    """Take a registered lever back."""
    del _REGISTERED[name]


def lever_types() -> tuple[type[Lever], ...]:
    """All registered types, in the order in which they were registered."""
    return tuple(_REGISTERED.values())


CLASSES = (Exactness.EXACT, Exactness.ROUNDING)  # which a user may name for all levers of at most that exactness


def allowed_levers(levers: str | Iterable[str] | None) -> frozenset[str]:
    """The names of the levers that a plan may use: those of a class, `"exact"` (also None) or `"rounding"`, and those
    that are named; a list may hold both, `["rounding", "offload"]`. Raises `InputError` for an unknown one.
    """
    named = ("exact",) if levers is None else (levers,) if isinstance(levers, str) else tuple(levers)
    allowed: set[str] = set()
    for name in named:
        if name not in CLASSES and name not in _REGISTERED:
            raise InputError(
                f"lever {name!r} is not known: choose exact, rounding, and any of {', '.join(_REGISTERED)}"
            )
        allowed.update(_in_class(name) if name in CLASSES else (name,))
    return frozenset(allowed)


def _in_class(name: str) -> list[str]:
    """The levers that a class stands for."""
    included = CLASSES[: CLASSES.index(Exactness(name)) + 1]
    return [kind.name for kind in lever_types() if kind.exactness in included and not kind.on_request]


def lever_from_dict(raw: Mapping[str, Any]) -> Lever:
    """The lever that `Lever.to_dict` wrote. Raises `ValueError` for a name that is not registered."""
    fields = dict(raw)
    name = fields.pop("name", None)
    if name not in _REGISTERED:
        raise ValueError(f"lever {name!r} is not known")
    return _REGISTERED[name].from_dict(fields)


def find(levers: Iterable[Lever], kind: type[L]) -> L | None:
    """The lever of a type among some; None where there is none."""
    return next((lever for lever in levers if isinstance(lever, kind)), None)
