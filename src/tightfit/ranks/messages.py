"""The seconds of messages between ranks on cards: rings at published rates, beside the computing of their phase.

Assumed, not measured. NCCL sends in rings, in which the links of all cards are busy at once. A ring gathers or reduces
B bytes of n ranks in (n - 1) / n * B / rate, and an all-reduce does both. The rate is a share of the published one of
the slowest link. Latencies are left out.
"""

from collections.abc import Sequence
from dataclasses import replace

from tightfit.devices.clocks import Seconds
from tightfit.devices.figures import LINK_SHARE
from tightfit.devices.spec import DeviceSpec
from tightfit.ranks.sharing import ADDED_UP, GATHERED
from tightfit.ranks.world import World
from tightfit.tracing.copies import TO_DEVICE, TO_HOST
from tightfit.tracing.record import OperatorRecord, Phase, StepTrace
from tightfit.tracing.recording import OperatorCost
from tightfit.tracing.shapes import TensorShape
from tightfit.units import format_bytes

PREFIX = "c10d."
MESSAGES = (PREFIX, GATHERED, ADDED_UP)
BESIDE = (PREFIX, TO_HOST, TO_DEVICE)  # what runs beside the computing: messages, and copies of shards on the host
# One way, of each card: 400 Gb/s. The makers' servers have one such adapter for each of eight H100, H200 or B200
# (docs.nvidia.com/dgx-basepod, "Core Components").
NETWORK_BYTES_PER_SECOND = 50e9


def rate_of(device: DeviceSpec, world: World) -> float | None:
    """Bytes per second that a ring of the world is assumed to reach; None where no rate is published."""
    if device.roofline is None or world.size == 1:
        return None
    between_cards = device.roofline.peer_bytes_per_second or device.roofline.link_bytes_per_second
    if world.nodes == 1 or world.copies > 1:  # of copies, what is sent within a node
        return between_cards * LINK_SHARE
    # As many rings as a node has cards, each through the network of another card.
    network = NETWORK_BYTES_PER_SECOND * (world.size // world.nodes)
    return min(network, between_cards) * LINK_SHARE


def _between_nodes(rate: float) -> float:
    """Bytes per second of one card's adapter, where `rate` is that of its links."""
    return min(NETWORK_BYTES_PER_SECOND * LINK_SHARE, rate)


def with_messages(price: OperatorCost, device: DeviceSpec, world: World) -> OperatorCost:
    """Prices of operators in which collectives take the seconds of their messages. Unchanged where no rate is known."""
    rate = rate_of(device, world)
    if rate is None:
        return price

    def priced(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple) -> float:
        if not name.startswith(MESSAGES):
            return price(name, inputs, outputs, arguments)
        sizes = [shape.bytes for shape in inputs]
        if world.copies == 1:
            return Seconds.of(host=0.0, device=sent_bytes(name, sizes, world.size) / rate)
        # Gradients are added up over the nodes shard by shard: as many rings as shards, each card with its own adapter.
        within = "allreduce" not in name
        ranks, speed = (world.shards_of_each, rate) if within else (world.copies, _between_nodes(rate))
        return Seconds.of(host=0.0, device=sent_bytes(name, sizes, ranks) / speed)

    return priced


def sent_bytes(name: str, sizes: Sequence[int], ranks: int) -> float:
    """Bytes that each card sends for a collective. `sizes` are those of its tensors, written ones first."""
    share = (ranks - 1) / ranks
    if "allreduce" in name:
        return 2 * share * sum(sizes)
    if name == GATHERED:
        return (ranks - 1) * sum(sizes)  # of its own part, which each other one gets
    if "allgather" in name or "reduce_scatter" in name or "alltoall" in name or name == ADDED_UP:
        return share * max(sizes, default=0)  # of shards and the whole, the whole
    return share * sum(sizes)


def seconds_of_reductions(trace: StepTrace) -> float:
    """The seconds of a step in which it waits for its gradients to be exchanged."""
    inside = [operator for operator in trace.operators if operator.phase in _BACKWARD]
    return sum(each.seconds for each in inside if each.name.startswith(PREFIX) and "reduce" in each.name)


def overlapped(trace: StepTrace, world: World) -> StepTrace:
    """A trace in which the messages of forward and backward take only what outlasts the phase's computing.

    DDP and FSDP2 send on streams of their own. That of the optimizer's phase (clipping) is waited for, and so is each
    message of tensor parallel, and of attention in context parallel: the next operator reads it.
    """
    if world.parallel == "tp":
        return trace
    factors = {phase: _exposed(trace, phases) for phase, phases in _BESIDE.items()}

    def left(operator: OperatorRecord) -> OperatorRecord:
        factor = factors.get(operator.phase, 1.0) if operator.name.startswith(BESIDE) else 1.0
        if factor == 1.0:
            return operator
        return operator._replace(seconds=operator.seconds * factor, device_seconds=operator.device_seconds * factor)

    return replace(trace, operators=tuple(map(left, trace.operators)))


# The recomputation of a block is part of its backward.
_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
_BESIDE = {Phase.FORWARD: (Phase.FORWARD,), Phase.BACKWARD: _BACKWARD, Phase.RECOMPUTE: _BACKWARD}


def _exposed(trace: StepTrace, phases: tuple[Phase, ...]) -> float:
    """The share of the messages' seconds that outlasts the computing of these phases."""
    inside = [operator for operator in trace.operators if operator.phase in phases]
    sending = sum(operator.seconds for operator in inside if operator.name.startswith(BESIDE))
    computing = sum(operator.seconds for operator in inside if not operator.name.startswith(BESIDE))
    return max(0.0, sending - computing) / sending if sending else 1.0


def sentence(device: DeviceSpec, world: World) -> str:
    """The assumption about the time of messages."""
    rate = rate_of(device, world)
    if rate is None:
        return "the time that messages between ranks take was left out of the seconds"
    beside = "beside the computing of forward and backward: what outlasts it is in the seconds"
    when = {
        "tp": " and each was waited for",
        "hsdp": f", those between nodes at {format_bytes(_between_nodes(rate))}/s, {beside}",
        "cp": f"; those of attention were waited for, and those of weights run {beside}",
    }.get(world.parallel, f" {beside}")
    return (
        f"messages between ranks were assumed to run at {format_bytes(rate)}/s ({LINK_SHARE:.0%} of the published "
        f"rate){when}"
    )
