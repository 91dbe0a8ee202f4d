"""The base class of levers: one frozen dataclass with a name, an exactness, settings, wording and JSON.

Everything that lists levers reads the registered types: the YAML schema, the command line's help, the rows that say
"not allowed", the search, `verify`, the doctor and the documentation. No torch here: a lever's methods import it when
they run.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from tightfit.errors import InputError
from tightfit.names import Exclusion

if TYPE_CHECKING:
    from torch import nn

    from tightfit.devices.spec import DeviceSpec
    from tightfit.levers.handle import Removable
    from tightfit.levers.offload import HostStore
    from tightfit.levers.recompute import OperatorKey, Policy
    from tightfit.planner.records import BlockChoice
    from tightfit.step import Batch
    from tightfit.tracing.record import StepTrace

# Sums in another order change the error of the gradients against fp64 by up to 2% (notes/exactness.md, "Rounding").
ROUNDING_SPREAD = 1.02


class Exactness(enum.StrEnum):
    """The change that a lever makes to the loss and the gradients: none, the order of sums, or more than that."""

    EXACT = "exact"
    ROUNDING = "rounding"
    INEXACT = "inexact"


class Role(enum.Enum):
    """When and how the search uses a lever."""

    INSIDE_BLOCKS = "inside blocks"  # decided for each operator of each block, and solved exactly
    COMBINED = "combined"  # each of its settings is combined with each setting of the others
    WHOLE_BLOCKS = "whole blocks"  # replaces the choices inside blocks; the fastest setting is tried first
    EXECUTION = "execution"  # another way to run what was chosen inside blocks, tried on the fastest plan
    WEIGHTS = "weights"  # frees the device of weights: tried with the combinations that others leave too large
    LAST = "last"  # tried only if nothing else fits


@dataclass(frozen=True)
class PlainStep:
    """The step without levers, from which a lever derives its settings.

    `blocks` are the paths of the repeated blocks. `trace` is the dry run of the whole step. `micro_batches` is the
    caller's own gradient accumulation. `size` is the number of sequences in the batch. `separation` says whether these
    can be computed apart. `updates_on_host`: the optimizer updates all weights where the host has them. `folder` is
    where streamed weights are in a file (None: pinned memory of a card, or a CPU's folder for temporary files).
    """

    model: "nn.Module"
    batch: "Batch"
    trace: "StepTrace"
    blocks: tuple[str, ...]
    micro_batches: int
    size: int
    separation: "Callable[[], Separation]"
    updates_on_host: bool = False
    folder: str | None = None


class Separation(NamedTuple):
    """The answer to whether the samples of a batch can be computed apart: `refusal` says why not. `tried`: on real
    numbers.
    """

    refusal: str | None
    tried: bool


@dataclass(frozen=True)
class Choice:
    """One way to run the blocks of a kind: the policy for each operator's output, and the seconds of recomputing."""

    policy: "Policy"
    seconds: float


class KeptOutputs(Protocol):
    """Operators of a block whose outputs are kept until backward, by place, and the seconds of replaying the rest."""

    @property
    def kept(self) -> frozenset[int]: ...

    @property
    def replay_seconds(self) -> float: ...


class BlockKind(Protocol):
    """A kind of block, as levers that work inside blocks see it."""

    def keep_sets(self, limit: int) -> Sequence[KeptOutputs]:
        """Keep sets, from everything to nothing: about `limit` chosen by price, and those of least memory."""
        ...

    def keys(self, places: frozenset[int]) -> "frozenset[OperatorKey]":
        """The operators at these places."""
        ...

    def pinned(self, places: frozenset[int]) -> frozenset[int]:
        """Those of these places whose outputs are small, or held in any case."""
        ...


@dataclass(frozen=True)
class Suggestion:
    """A suggestion of the doctor to use a lever: in words, as a line of Python, and as a line of YAML.

    `lever` is the setting for the whole step, `inside` the policy for every block. In both lines, `BUDGET` is replaced
    by the predicted peak.
    """

    name: str
    python: str
    yaml: str
    lever: "Lever | None" = None
    inside: "Policy | None" = None


@dataclass(frozen=True)
class Lever:
    """A lever with its setting. Each subclass is one lever; its fields are the setting.

    - `name`: the name in files and arguments. `title`: the name in tables. `summary`: what the lever does.
    - `spread`: the factor by which a lever that is exact to rounding may change the gradients' error against fp64.
    - `bound`: the largest relative error of the gradients that `verify` accepts from an inexact lever.
    - `on_request`: a plan uses the lever only if the user names it, because it needs more than memory and time.
    - `repaid_beside`: the name of another lever. Where that one is allowed, a plan may use this one without its name if
      the number of steps is known and repays the seconds that preparing it takes.
    - `excludes`: settings with which the lever cannot be combined.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    exactness: ClassVar[Exactness]
    role: ClassVar[Role] = Role.COMBINED
    spread: ClassVar[float] = ROUNDING_SPREAD
    bound: ClassVar[float] = 0.0
    on_request: ClassVar[bool] = False
    repaid_beside: ClassVar[str | None] = None
    needs_blocks: ClassVar[bool] = False
    excludes: ClassVar[tuple[Exclusion, ...]] = ()

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        """The possible settings of the lever in this step, the fastest first. Empty if it has nothing to work on."""
        raise NotImplementedError  # each lever has its own

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        """Why the lever has no setting in this step, as a line for the plan; None for no line."""
        return None

    @classmethod
    def options(cls, block: BlockKind, allowed: frozenset[str]) -> Sequence[Choice]:
        """The ways to run a block with this lever, given the names of all `allowed` levers.

        Only levers that work inside blocks have options.
        """
        raise NotImplementedError  # only levers that work inside blocks have options

    @classmethod
    def frugal_policy(cls, allowed: frozenset[str]) -> "Policy":
        """The policy of about the least memory with this lever, given the names of all `allowed` levers."""
        raise NotImplementedError  # only levers that work inside blocks have one

    @classmethod
    def refusal(cls, device: "DeviceSpec") -> str | None:
        """Why a plan for the device cannot use the lever; None if it can."""
        return None

    def apply(self, model: "nn.Module") -> "Removable":
        """Apply the lever to the modules of a model, and return the handle that removes it."""
        raise NotImplementedError  # each lever of modules has its own

    def mixed(self, higher: Self, last: int) -> Self:
        """This setting, with the `higher` one in the `last` blocks, whose backward comes first.

        Only levers on whole blocks can be mixed.
        """
        raise NotImplementedError  # only levers that take whole blocks can be mixed

    def sentence(self, choices: Sequence["BlockChoice"]) -> str:
        """A sentence about the lever's effect in a plan with these choices inside blocks, for tables and pages."""
        raise NotImplementedError  # each lever has its own

    def taken_out(self, choices: "Sequence[BlockChoice]") -> "tuple[BlockChoice, ...]":
        """The choices of the same plan without this lever, which recompute the same operators."""
        return tuple(choices)

    def __str__(self) -> str:
        """The setting in a few words, for lists of levers."""
        return self.title

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """Suggestions to use the lever in this step: by default its fastest setting, in a plan with no other lever."""
        python = f'tightfit.plan(model, batch, "BUDGET", levers=["{cls.name}"]).apply(model)'
        yaml = f"memory: {{budget: BUDGET, levers: [{cls.name}]}}"
        return [Suggestion(str(setting), python, yaml, lever=setting) for setting in cls.settings(step)[:1]]

    def to_dict(self) -> dict[str, Any]:
        """The lever as JSON."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The lever of a JSON mapping, without its `name`."""
        return cls(**raw)


class BlockLever(Lever):
    """A lever that says how blocks run, and is not applied by itself.

    The choices of a plan say what each block keeps, recomputes and offloads. `apply_levers` gives each block these
    choices together with what all levers of this type say about it, since one executor runs it.
    """

    def within(self, paths: Sequence[str]) -> Self:
        """This setting, for those of its blocks that are among `paths`."""
        return self

    def captured(self) -> Mapping[str, bool]:
        """The paths of blocks that run as captured programs, and whether the compiler writes these."""
        return {}

    def compiled(self) -> Mapping[str, float]:
        """The paths of blocks that `torch.compile` compiles, with the `activation_memory_budget` of each."""
        return {}

    def offload_store(self) -> "HostStore | None":
        """The store to which blocks offload, with room for the plan."""
        return None


def refusal_without_link(name: str, device: "DeviceSpec") -> str | None:
    """Why a plan for the device cannot use a lever that copies to the host; None if it can."""
    from tightfit.devices.figures import copy_rates

    if device.kind != "cuda" or copy_rates(device) is not None:
        return None
    return (
        f"{name} is not available on {device.name}: the rate of its link to the host is not known: calibrate it "
        f"again, or leave {name} out of the levers (recompute is exact too)"
    )


LeverType = TypeVar("LeverType", bound=type[Lever])
L = TypeVar("L", bound=Lever)

_REGISTERED: dict[str, type[Lever]] = {}


def register(kind: LeverType) -> LeverType:
    """Register a type of lever under its name (a class decorator). Raises `ValueError` if the name is taken."""
    if kind.name in (*_REGISTERED, *CLASSES):
        raise ValueError(f"there is a lever {kind.name!r} already")
    _REGISTERED[kind.name] = kind
    return kind


def forget(name: str) -> None:
    """Remove a registered lever."""
    del _REGISTERED[name]


def lever_types() -> tuple[type[Lever], ...]:
    """All registered types, in the order in which they were registered."""
    return tuple(_REGISTERED.values())


CLASSES = (Exactness.EXACT, Exactness.ROUNDING)  # a user may name one of these to allow all levers up to it


def allowed_levers(levers: str | Iterable[str] | None) -> frozenset[str]:
    """The names of the levers that a plan may use.

    `"exact"` (or None) and `"rounding"` name classes of levers. A list may hold classes and single levers:
    `["rounding", "offload"]`. Raises `InputError` for an unknown name.
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
    """The names of the levers in a class, without those on request."""
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
    """The first lever of a type; None if there is none."""
    return next((lever for lever in levers if isinstance(lever, kind)), None)
