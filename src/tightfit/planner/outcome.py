"""The results of planning as plain data: plans, estimates and curves."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tightfit.planner.levers import Combination, Lever, find
from tightfit.planner.levers.base import L
from tightfit.planner.records import (
    BlockChoice,
    CurvePoint,
    DeviceRoom,
    HostMemory,
    PlannedProgram,
    Rejected,
    StepFigures,
    WithHost,
)
from tightfit.ranks.world import Sharding

if TYPE_CHECKING:
    from tightfit.step import Precision


@dataclass(frozen=True)
class CurveRecord:
    """The best ways to run a step, and fixed recipes to compare with; all traced as applied.

    `points` are ordered from the fastest to the least peak: bytes fall and seconds rise strictly. `recipes` need no
    plan: no lever, every block recomputed, every second block recomputed, chunked loss, and both together.
    """

    points: tuple[CurvePoint, ...]
    recipes: tuple[CurvePoint, ...]

    def within(self, budget_bytes: int) -> CurvePoint | None:
        """The fastest point whose peak is at most the budget; None if there is none."""
        return next((point for point in self.points if point.peak_bytes <= budget_bytes), None)


@dataclass(frozen=True)
class EstimateRecord(WithHost):
    """The predicted memory and time of one training step with no lever applied. Bytes are ints."""

    step_figures: StepFigures
    parameters: int
    precision: str
    optimizer: str
    device: str
    device_bytes: int
    assumptions: tuple[str, ...]
    context_bytes: int = 0  # on CUDA: the assumed memory of the process outside of the allocator
    fits: bool = True  # whether the step fits the device without levers; on CUDA with reserved memory and the context
    worst_peak_bytes: int | None = None  # with all tokens at the fewest experts, if the peak depends on routing
    weights: str = ""  # dtypes of the parameters, the one with the most elements first
    world_size: int = 1  # ranks; the figures above are those of the rank with the highest peak
    nodes: int = 1
    parallel: str | None = None  # the engine that joins the ranks: ddp, fsdp2, hsdp, tp or cp
    rank_peak_bytes: tuple[int, ...] = ()  # of each rank, in their order; empty without ranks
    communicator_bytes: int = 0  # assumed: what NCCL takes of a card's memory outside of the allocator
    base_bytes: int = 0  # of frozen weights, with their scales
    not_quantised: Mapping[str, int] = field(default_factory=dict)  # of those at full width beside few bits, by name
    adapted: tuple[str, ...] = ()  # names of the layers that have adapters
    host: HostMemory = field(default_factory=HostMemory, compare=False)  # no two processes are of the same size

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak; on CUDA, `torch.cuda.max_memory_allocated`."""
        return self.step_figures.peak_bytes

    @property
    def _training_step(self) -> StepFigures:
        return self.step_figures

    @property
    def reserved_bytes(self) -> int | None:
        """On CUDA, `torch.cuda.max_memory_reserved`; None on a CPU."""
        return self.step_figures.reserved_bytes

    @property
    def taken_bytes(self) -> int:
        """The device memory that the step takes: tensors, and on CUDA the allocator's segments and the context. Where
        it fits, at most the device: near its limit the allocator returns free segments.
        """
        whole = (self.reserved_bytes or self.peak_bytes) + self.context_bytes
        return min(whole, self.device_bytes) if self.fits else whole

    @property
    def step_seconds(self) -> float:
        return self.step_figures.step_seconds

    @property
    def by_category(self) -> Mapping[str, int]:
        """Bytes at the peak: parameters, gradients, optimizer states, activations, inputs, workspace."""
        return self.step_figures.by_category

    @property
    def peak_phase(self) -> str:
        """Forward, recompute, backward or optimizer."""
        return self.step_figures.peak_phase

    @property
    def peak_module(self) -> str:
        """Path of the module that is running at the peak; empty at the top level."""
        return self.step_figures.peak_module


@dataclass(frozen=True)
class PlanRecord(WithHost):
    """The fastest combination of levers found whose peak, traced as applied, is within the budget.

    Bytes are ints. Seconds are those of one step with all its micro-batches. `levers` are the levers in use, each with
    its setting; `choices` has one choice for each block. `fingerprint` identifies the model's parameters: a plan can be
    applied only to the model it was made for. `curve` is None unless it was requested.
    """

    budget_bytes: int
    planned: StepFigures
    plain: StepFigures
    choices: tuple[BlockChoice, ...]
    levers: tuple[Lever, ...]
    rejected: tuple[Rejected, ...]
    precision: "Precision"
    optimizer: str
    device: str
    fingerprint: str
    assumptions: tuple[str, ...] = ()
    batch: str = ""
    curve: CurveRecord | None = None
    worst_peak_bytes: int | None = None  # with all tokens at the fewest experts, if the peak depends on routing
    weights: str = ""  # dtypes of the parameters, the one with the most elements first; empty in older plans
    room: DeviceRoom | None = None  # the planned step's memory on a CUDA device
    world_size: int = 1  # ranks; the figures are those of the first one, which has the largest shards
    nodes: int = 1
    parallel: str | None = None  # the engine that joins the ranks: ddp, fsdp2, hsdp, tp or cp
    reshard_after_forward: bool | None = None  # of FSDP2's blocks: whether gathered weights are freed after forward
    sharded_blocks: tuple[str, ...] = ()  # the blocks, each of which FSDP2 shards by itself
    sharded_apart: tuple[str, ...] = ()  # modules that it shards by themselves, beside the blocks
    shards_on_host: bool = False  # whether FSDP2 keeps weights, gradients and states on the host (CPUOffloadPolicy)
    host_bytes: int = 0  # of these, for the rank with the largest shards
    reduces_once: bool = False  # whether FSDP2 exchanges gradients in the last of several micro-batches only
    rank_peak_bytes: tuple[int, ...] = ()  # of each rank under the plan, in their order; empty for one process
    communicator_bytes: int = 0  # assumed: what NCCL takes of a card's memory outside of the allocator
    ddp: tuple[tuple[str, Any], ...] = ()  # settings of DDP that are not PyTorch's defaults
    programs: tuple[PlannedProgram, ...] = ()  # of the blocks that keep or offload something; none in older plans
    host: HostMemory = field(default_factory=HostMemory, compare=False)  # no two processes are of the same size

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the planned step."""
        return self.planned.peak_bytes

    @property
    def _training_step(self) -> StepFigures:
        return self.planned

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the planned step."""
        return self.planned.step_seconds

    @property
    def plain_peak_bytes(self) -> int:
        return self.plain.peak_bytes

    @property
    def micro_batches(self) -> int:
        """The number of equal parts in which the batch runs."""
        return Combination(self.levers).micro_batches

    @property
    def sharding(self) -> Sharding:
        """The plan's choices about FSDP2."""
        freed = False if self.reshard_after_forward is False else None
        return Sharding(freed, self.sharded_apart, self.reduces_once, self.shards_on_host)

    @property
    def hash(self) -> str:
        """A checksum of what a plan makes of a step, without its figures: ranks that share it do the same."""
        done = [
            self.fingerprint, self.precision, self.world_size,
            (self.parallel, self.nodes) if self.parallel == "hsdp" else self.parallel,  # else nodes change nothing
            self.sharded_blocks, self.sharding, self.ddp,
            [lever.to_dict() for lever in self.levers],
            [replace(choice, kept_bytes=0, recompute_seconds=0.0) for choice in self.choices],
        ]  # fmt: skip
        return hashlib.sha256(repr(done).encode()).hexdigest()[:16]

    def lever(self, kind: type[L]) -> L | None:
        """The setting of a lever in this plan; None if the plan does not use it."""
        return find(self.levers, kind)
