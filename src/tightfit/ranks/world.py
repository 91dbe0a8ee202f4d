"""How a training is spread over processes. No torch here."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from tightfit.errors import InputError

Parallel = Literal["ddp", "fsdp2"]
LARGEST = 1 << 14  # ranks of one process group; the list of their peaks is as long


def world_of(size: int | None, nodes: int | None, parallel: str | None) -> "World | None":
    """The world that these arguments name; None for one process. Raises `InputError`."""
    if size is None:
        given = [name for name, value in (("nodes", nodes), ("parallel", parallel)) if value is not None]
        if given:
            raise InputError(f"{given[0]} is given without world_size: say how many ranks there are")
        return None
    return World(size, cast(Parallel, parallel or "fsdp2"), 1 if nodes is None else nodes)


@dataclass(frozen=True)
class World:
    """The processes of one training, each with a device of its own, and the engine that joins them."""

    size: int
    parallel: Parallel = "fsdp2"
    nodes: int = 1
    reshard_after_forward: bool | None = None  # of FSDP2: whether gathered weights are freed; None: its own default

    def __post_init__(self) -> None:
        """Raise `InputError` for what no training can have."""
        for name, count in (("world_size", self.size), ("nodes", self.nodes)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise InputError(f"{name} is {count!r}, wanted an integer of at least 1")
        if self.size > LARGEST:
            raise InputError(f"world_size is {self.size}, wanted at most {LARGEST}")
        if self.parallel not in get_args(Parallel):
            raise InputError(f"parallel {self.parallel!r} is not known: choose {' or '.join(get_args(Parallel))}")
        if self.size % self.nodes:
            raise InputError(f"{self.size} ranks cannot be spread evenly over {self.nodes} nodes: change one of them")


# NCCL allocates past PyTorch: with 8 H100 some 10 MiB for each of up to 32 channels and each of 2 to 4 connections
# (github.com/NVIDIA/nccl/issues/1685, where 1.06 GB are in use before the first all-to-all; 1.6 GB in issues/864). The
# number of ranks moves it little, says issues/986. Nobody publishes a rule, so this is a round figure.
_COMMUNICATOR = 1 << 30


def communicator_bytes(world: World) -> int:
    """Bytes that NCCL is assumed to take of each card for the one communicator of a world."""
    return _COMMUNICATOR if world.size > 1 else 0
