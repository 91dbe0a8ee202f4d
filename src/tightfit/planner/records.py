"""The parts of plans, estimates and curves as plain data, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Action = Literal["keep", "recompute", "operators", "offload", "compile"]


@dataclass(frozen=True)
class BlockChoice:
    """The choice for one block: keep all activations, recompute them all, or keep the outputs of some operators.

    `kept` names the operator calls whose outputs are kept: the operator, how many calls of it on such operands came
    before in the block, and the operands (dtype and rank of each; absent in plans of earlier versions). `kept_modules`
    gives the module inside the block that each call runs in, empty for the block itself.
    `offloaded` and `offloaded_modules` name the offloaded outputs in the same way. With `offloads_inputs` the block's
    inputs are offloaded too. `joined` means that the block's output is recomputed as well, because it is in one segment
    with the next block. `share` is the `activation_memory_budget` of a block whose action is `compile`. A `captured`
    block does this in programs that were recorded once, a `compiled` one in code of PyTorch's compiler.
    """

    path: str
    action: Action
    kept: tuple[tuple, ...] = ()
    kept_modules: tuple[str, ...] = ()
    joined: bool = False
    kept_bytes: int = 0
    recompute_seconds: float = 0.0
    offloaded: tuple[tuple, ...] = ()
    offloaded_modules: tuple[str, ...] = ()
    offloads_inputs: bool = False
    share: float | None = None
    captured: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class PlannedProgram:
    """The operators that some blocks ran dry, in order: name, operands, and bytes of the results of each.

    The first real step is compared with them.
    """

    paths: tuple[str, ...]
    operators: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class DeviceRoom:
    """The memory that a step uses of a CUDA device, in bytes: the allocator's peak of reserved memory, and an assumed
    size of the context.

    A budget in per cent of the device limits both together (`is_bounded`). A budget in bytes limits only the tensors
    (`max_memory_allocated`).
    """

    device_bytes: int
    reserved_bytes: int
    context_bytes: int
    is_bounded: bool

    @property
    def taken_bytes(self) -> int:
        """The allocator's segments and the context together, at most the device: near its limit the allocator returns
        free segments.
        """
        return min(self.reserved_bytes + self.context_bytes, self.device_bytes)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind at the peak: `count` of them, `bytes` together.

    `name` is the name of a parameter or a state, else the path of the module that allocated them. It has `*` in place
    of a block's number if the names differ only in that. `operator` allocated them; it is empty for tensors that
    existed before the step.
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
    """The figures of a plain or a planned step.

    `timeline` holds bytes by category at evenly spaced operators. The other timelines hold the phase, the operator and
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
    reserved_bytes: int | None = None  # on CUDA: the peak of the allocator's reserved memory
    timeline_operators: tuple[str, ...] = ()
    timeline_modules: tuple[str, ...] = ()
    top: tuple[TensorGroup, ...] = ()
    # The two clocks of the step, the host's launches and the device's kernels; equal on a CPU. None in older plans.
    host_seconds: float | None = None
    device_seconds: float | None = None
    # Bytes that the step has in the host's memory at the highest point there: on a CPU those of `by_category`, on a
    # card what levers and optimizers moved there. Empty in older plans.
    host_by_category: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Figures from the JSON of their fields."""
        timeline = {category: tuple(levels) for category, levels in raw["timeline"].items()}
        at_points = {name: tuple(raw[name]) for name in ("timeline_phases", "timeline_operators", "timeline_modules")}
        top = tuple(TensorGroup(**{**group, "shape": tuple(group["shape"])}) for group in raw["top"])
        return cls(**{**raw, **at_points, "timeline": timeline, "top": top})


@dataclass(frozen=True)
class HostMemory:
    """The host's memory that a training takes, without what its steps put there, in bytes.

    - `process`: Python and the libraries, as they were measured in the process that planned; 0 in older plans.
    - `loaded`: weights that are in the host's memory before they go to a card; 0 on a CPU, where they are the step's.
    - `copies`: of a checkpoint that is written while steps run, or the buffer through which one is written.
    """

    process: int = 0
    loaded: int = 0
    copies: int = 0

    def by_category(self, step: Mapping[str, int]) -> dict[str, int]:
        """Bytes at the highest point: while weights are loaded, or in a step."""
        in_steps = {category: size for category, size in step.items() if size}
        if self.copies:
            in_steps["checkpoint"] = self.copies
        loading = {"weights while loading": self.loaded}
        return {"process": self.process, **(loading if self.loaded > sum(in_steps.values()) else in_steps)}


class WithHost:
    """A record of a step that says what a training of it takes of the host's memory: `host`, and the step's own."""

    host: HostMemory

    @property
    def _training_step(self) -> StepFigures:
        """The step that runs in the training."""
        raise NotImplementedError  # each record names it in its own way

    @property
    def host_by_category(self) -> Mapping[str, int]:
        """Bytes of the host's memory at the highest point there: the process, and what a training puts beside it."""
        return self.host.by_category(self._training_step.host_by_category)

    @property
    def host_peak_bytes(self) -> int:
        """Predicted peak of the host's memory."""
        return sum(self.host_by_category.values())


@dataclass(frozen=True)
class Rejected:
    """A combination of levers that the search rejected, and why."""

    levers: str
    reason: str
    peak_bytes: int | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class CurvePoint:
    """One way to run the step, traced as applied: its levers in words, its peak, and its seconds."""

    levers: str
    peak_bytes: int
    step_seconds: float
