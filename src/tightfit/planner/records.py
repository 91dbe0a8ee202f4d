"""What plans, estimates and curves are made of: plain data, without torch, for whoever shows or stores it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Action = Literal["keep", "recompute", "operators", "offload", "compile"]


@dataclass(frozen=True)
class BlockChoice:
    """What one block does: keeps all its activations, recomputes them all, or keeps the outputs of some operators.

    `kept` names the operator calls whose outputs are kept, each with how many of that name came before it in the
    block, and `kept_modules` the module inside the block that each runs in, empty for the block itself. `joined` tells
    that the block's output is not held for the next one: both belong to one segment. `offloaded` and
    `offloaded_modules` name likewise the operator calls whose outputs are offloaded; with `offloads_inputs` what the
    block is given is offloaded too. A compiled block keeps `share` of what the compiler would like to keep.
    """

    path: str
    action: Action
    kept: tuple[tuple[str, int], ...] = ()
    kept_modules: tuple[str, ...] = ()
    joined: bool = False
    kept_bytes: int = 0
    recompute_seconds: float = 0.0
    offloaded: tuple[tuple[str, int], ...] = ()
    offloaded_modules: tuple[str, ...] = ()
    offloads_inputs: bool = False
    share: float | None = None


@dataclass(frozen=True)
class DeviceRoom:
    """What a step takes of a CUDA device as a whole, in bytes: what the allocator reserves for its tensors at most, and
    an assumption for the context. A budget in per cent of the device bounds that (`is_bounded`); one in bytes bounds
    the tensors alone, `max_memory_allocated`.
    """

    device_bytes: int
    reserved_bytes: int
    context_bytes: int
    is_bounded: bool

    @property
    def taken_bytes(self) -> int:
        """The allocator's segments and the context together; near the device's limit the allocator gives back what is
        free.
        """
        return min(self.reserved_bytes + self.context_bytes, self.device_bytes)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind that are there at the peak: `count` of them, `bytes` together.

    `name` is that of a parameter or a state, else the path of the module that made them; where several differ only in
    a block's number, `*` stands for it. `operator` made them, empty for what was there before the step.
    """

    name: str
    operator: str
    category: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class StepFigures:
    """A step in figures: the plain one, or the planned one.

    `timeline` holds bytes by category at evenly spaced operators, and the other timelines the phase, the operator and
    the module of each. `top` are the largest groups of tensors at the peak, the largest first.
    """

    peak_bytes: int
    step_seconds: float
    by_category: Mapping[str, int]
    phase_peaks: Mapping[str, int]
    seconds_by_phase: Mapping[str, float]
    peak_phase: str
    peak_module: str
    peak_operator: str
    timeline: Mapping[str, tuple[int, ...]]
    timeline_phases: tuple[str, ...]
    reserved_bytes: int | None = None  # on CUDA: what the allocator holds of the device at most
    timeline_operators: tuple[str, ...] = ()
    timeline_modules: tuple[str, ...] = ()
    top: tuple[TensorGroup, ...] = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """From the JSON of its fields."""
        timeline = {category: tuple(levels) for category, levels in raw["timeline"].items()}
        at_points = {name: tuple(raw[name]) for name in ("timeline_phases", "timeline_operators", "timeline_modules")}
        top = tuple(TensorGroup(**{**group, "shape": tuple(group["shape"])}) for group in raw["top"])
        return cls(**{**raw, **at_points, "timeline": timeline, "top": top})


@dataclass(frozen=True)
class Rejected:
    """A combination of levers that was not taken, and why."""

    levers: str
    reason: str
    peak_bytes: int | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class CurvePoint:
    """One way to run the step, traced as applied: its levers in words, its peak, and the seconds of a step."""

    levers: str
    peak_bytes: int
    step_seconds: float
