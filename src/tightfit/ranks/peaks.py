"""The peaks of all ranks of a world.

Ranks that hold equal shards have equal steps. Rank 0 has the largest shards, and its whole step is simulated. The
others run the same operators in forward and backward, on buffers of the same sizes, because FSDP2 pads what it gathers
and reduces. They differ in the optimizer's states and in what the optimizer's step allocates: only that is simulated
for them. Context parallel whose attention makes masks on a card is the exception: each rank's step is simulated, since
a mask is as long as the keys that the rank's tokens see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from tightfit.ranks.simulated import SimulatedRank, own_copy
from tightfit.ranks.world import World
from tightfit.step import Precision
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.unbacked import unbacked_tensor

RankTracer = Callable[[nn.Module, SimulatedRank], StepTrace]  # the step of a rank's own model
UpdateTracer = Callable[[nn.Module], StepTrace]  # the optimizer's phase on parameters that a module holds
Kind = tuple[int, ...]


@dataclass(frozen=True)
class RankTraces:
    """The step of the rank with the highest peak, and the peak of every rank in bytes."""

    largest: StepTrace
    peaks: tuple[int, ...]


def trace_ranks(
    model: nn.Module,
    world: World,
    blocks: Sequence[str],
    precision: Precision,
    trace: RankTracer,
    trace_update: UpdateTracer,
) -> RankTraces:
    """Play rank 0, and the optimizer's phase of one rank of each other kind."""
    largest = trace(own_copy(model), SimulatedRank(world, 0, blocks, precision))
    lengths = row_counts(model) if world.is_sharded else []
    kinds = [tuple(rows_of_rank(length, world, rank) for length in lengths) for rank in range(world.size)]
    if world.sharding.on_host:  # of what ranks differ in, nothing is on the device
        return RankTraces(largest, (largest.peak_bytes,) * world.size)
    if world.parallel == "cp" and _makes_masks(largest):
        every = [
            largest,
            *(trace(own_copy(model), SimulatedRank(world, rank, blocks, precision)) for rank in range(1, world.size)),
        ]
        return RankTraces(max(every, key=lambda each: each.peak_bytes), tuple(each.peak_bytes for each in every))
    peaks = {kinds[0]: largest.peak_bytes}
    if gathers_in_update(largest):
        # Muon multiplies whole matrices, so what a rank allocates is not a matter of its own shards.
        for rank, kind in enumerate(kinds):
            if kind not in peaks:
                peaks[kind] = trace(own_copy(model), SimulatedRank(world, rank, blocks, precision)).peak_bytes
    elif len(set(kinds)) > 1:
        phases = largest.phase_peaks()
        optimizer = phases.pop(Phase.OPTIMIZER)
        before = max(phases.values())
        first = _Update.of(trace_update(shards_of(model, world, 0)))
        for rank, kind in enumerate(kinds):
            if kind not in peaks:
                own = _Update.of(trace_update(shards_of(model, world, rank)))
                peaks[kind] = max(before - first.states + own.states, optimizer - first.highest + own.highest)
    return RankTraces(largest, tuple(peaks[kind] for kind in kinds))


def _makes_masks(trace: StepTrace) -> bool:
    """True if attention on cards has masks, as large as the keys that a rank's two pieces see (`causal_in_pieces`)."""
    is_on_card = trace.reserved_bytes is not None
    return is_on_card and not any("flash_attention" in o.name for o in trace.operators)


def gathers_in_update(trace: StepTrace) -> bool:
    """True if the optimizer's step gathers shards of other ranks."""
    return any(o.phase is Phase.OPTIMIZER and "allgather" in o.name for o in trace.operators)


@dataclass(frozen=True)
class _Update:
    """The bytes of the optimizer's states, and of its phase at the highest without parameters and gradients."""

    states: int
    highest: int

    @classmethod
    def of(cls, trace: StepTrace) -> "_Update":
        # FSDP2 pads parameters and gradients, so these are alike in all ranks.
        at_peak = trace.by_category()
        padded = at_peak[Category.PARAMETER] + at_peak[Category.GRADIENT]
        return cls(trace.by_category(0)[Category.OPTIMIZER_STATE], trace.peak_bytes - padded)


def shards_of(model: nn.Module, world: World, rank: int) -> nn.Module:
    """A module that holds a rank's shard of each parameter, without memory."""
    held = nn.Module()
    for number, parameter in enumerate(model.parameters()):
        shape = (rows_of_rank(parameter.shape[0], world, rank), *parameter.shape[1:])
        memory = unbacked_tensor(shape, TensorShape.of(parameter).stride, parameter.dtype)
        held.register_parameter(str(number), nn.Parameter(memory, requires_grad=parameter.requires_grad))
    return held


def row_counts(model: nn.Module) -> list[int]:
    """The numbers of rows that parameters have, each once."""
    return sorted({parameter.shape[0] for parameter in model.parameters()})


def rows_of_rank(length: int, world: World, rank: int) -> int:
    """The rows in a rank's shard, of a parameter with so many: `torch.chunk` gives the last ranks fewer, or none."""
    each = -(-length // world.shards_of_each)
    return min(each, max(0, length - rank % world.shards_of_each * each))
