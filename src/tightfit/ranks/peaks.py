"""The peaks of all ranks of a world: ranks that hold equal shards have equal steps, so one of them is played."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from tightfit.ranks.playing import PlayedRank, own_copy
from tightfit.ranks.world import World
from tightfit.step import Precision
from tightfit.tracing.record import StepTrace

RankTracer = Callable[[nn.Module, PlayedRank], StepTrace]  # the step of a rank's own model


@dataclass(frozen=True)
class RankTraces:
    """The step of the rank with the highest peak, and the peak of every rank in bytes."""

    largest: StepTrace
    peaks: tuple[int, ...]


def trace_ranks(
    model: nn.Module, world: World, blocks: Sequence[str], precision: Precision, trace: RankTracer
) -> RankTraces:
    """Play one rank of each kind."""
    traces: dict[tuple[int, ...], StepTrace] = {}
    kinds = [kind_of(model, world, rank) for rank in range(world.size)]
    for rank, kind in enumerate(kinds):
        if kind not in traces:
            traces[kind] = trace(own_copy(model), PlayedRank(world, rank, blocks, precision))
    largest = max(traces.values(), key=lambda found: found.peak_bytes)
    return RankTraces(largest, tuple(traces[kind].peak_bytes for kind in kinds))


def kind_of(model: nn.Module, world: World, rank: int) -> tuple[int, ...]:
    """What a rank holds: of each number of rows that parameters have, the rows in its shard. Ranks of one kind have
    equal steps.
    """
    if world.parallel == "ddp":
        return ()
    lengths = sorted({parameter.shape[0] for parameter in model.parameters() if parameter.dim()})
    return tuple(rows_of(length, world.size, rank) for length in lengths)


def rows_of(length: int, size: int, rank: int) -> int:
    """The rows in a rank's shard, of a parameter with so many: `torch.chunk` gives the last ranks fewer, or none."""
    each = -(-length // size)
    return min(each, max(0, length - rank * each))
