"""How a training is spread over processes. No torch here."""

from dataclasses import dataclass
from typing import Literal, get_args

from tightfit.errors import InputError

Parallel = Literal["ddp", "fsdp2"]
LARGEST = 1 << 14  # ranks of one process group; the list of their peaks is as long


@dataclass(frozen=True)
class World:
    """The processes of one training, each with a device of its own, and the engine that joins them."""

    size: int
    parallel: Parallel = "fsdp2"
    nodes: int = 1
    reshard_after_forward: bool = True  # FSDP2 frees gathered weights after a block's forward, and gathers them again

    def __post_init__(self) -> None:
        """Raise `InputError` for what no training can have."""
        for name, count in (("world_size", self.size), ("nodes", self.nodes)):
            if not isinstance(count, int) or count < 1:
                raise InputError(f"{name} is {count!r}, wanted an integer of at least 1")
        if self.size > LARGEST:
            raise InputError(f"world_size is {self.size}, wanted at most {LARGEST}")
        if self.parallel not in get_args(Parallel):
            raise InputError(f"parallel {self.parallel!r} is not known: choose {' or '.join(get_args(Parallel))}")
        if self.size % self.nodes:
            raise InputError(f"{self.size} ranks cannot be spread evenly over {self.nodes} nodes: change one of them")
