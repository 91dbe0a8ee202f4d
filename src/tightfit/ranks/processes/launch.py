"""The variables that `torchrun` gives to each process that it starts, read without torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.errors import RankError

# What `torchrun` sets in every process; other launchers that set all of them are read alike.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that were started together."""

    rank: int
    size: int
    local_rank: int  # among those on this machine
    local_size: int
    address: str
    port: int
    run: str = ""  # the run's name and the number of its restarts, so that a restart reads nothing of before
    has_agent: bool = False  # the launcher keeps the store, so it outlives every rank

    @property
    def is_several(self) -> bool:
        return self.size > 1


def launched(environment: Mapping[str, str] | None = None) -> Launch | None:
    """How this process was started with others; None where no launcher started it. Raises `RankError`."""
    environ = os.environ if environment is None else environment
    if any(name not in environ for name in NAMES):
        return None
    try:
        numbers = [int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        port = int(environ["MASTER_PORT"])
    except ValueError:
        said = ", ".join(f"{name}={environ[name]}" for name in NAMES)
        raise RankError(f"the environment of the launcher cannot be read ({said}): start with torchrun") from None
    rank, size, local_rank, local_size = numbers
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise RankError(
            f"the launcher says rank {rank} of {size}, local rank {local_rank} of {local_size}: start with torchrun"
        )
    run = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, size, local_rank, local_size, environ["MASTER_ADDR"], port, run, has_agent)
