"""A notice board that all ranks read: the launcher's key-value store.

It outlives a rank that is killed, and reading it never blocks. So it says what a collective cannot: that a rank has
failed and why, and whether somebody has reported it already.
"""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tightfit.errors import PeerFailed, RankError
from tightfit.ranks.processes.launch import Launch

_FAILED, _SAID, _REPORTED, _ENDED = "failed", "said", "reported", "ended"
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.25  # between two looks for a failure, while one waits for something else


class Board:
    """The board of one run. Raises `RankError` where it cannot be reached."""

    def __init__(self, launch: Launch, timeout_seconds: float):
        self.launch, self.timeout_seconds = launch, timeout_seconds
        try:
            self.store: Any = store_under(
                f"tightfit/{launch.run}",
                dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - its page says that it is public
                    launch.address,
                    launch.port,
                    is_master=not launch.has_agent and launch.rank == 0,
                    timeout=timedelta(seconds=timeout_seconds),
                    wait_for_workers=False,
                ),
            )
        except RuntimeError as error:
            raise RankError(
                f"rank {launch.rank} does not reach the launcher at {launch.address}:{launch.port}: start all ranks "
                "with one torchrun"
            ) from error
        self._looked = 0.0

    # Failures

    def fail(self, line: str, exit_code: int) -> None:
        """Say that this rank ends. The first failure stays."""
        self.store.compare_set(_FAILED, "", json.dumps([self.launch.rank, line, exit_code]))

    def look(self, *, now: bool = False) -> None:
        """Raise `PeerFailed` where another rank has failed."""
        if not now and time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self.store.check([_FAILED]):
            rank, line, exit_code = json.loads(self.store.get(_FAILED))
            raise PeerFailed(f"rank {rank} ended: {line}", exit_code)

    def is_first_to_speak(self) -> bool:
        """True if no rank has reported how this run ends; from now on, one has."""
        return self.store.add(_SAID, 1) == 1

    def meet_at_the_end(self, seconds: float, report_seconds: float, *, reports: bool) -> None:
        """Until all ranks are at their end, or so many seconds. The one that reports may take longer."""
        begun = time.monotonic()
        self.store.add(_ENDED, 1)
        if reports:
            self.store.set(_REPORTED, "1")
        while self.store.add(_ENDED, 0) < self.launch.size:
            if time.monotonic() - begun > (seconds if self.store.check([_REPORTED]) else report_seconds):
                return
            time.sleep(POLL_SECONDS)

    # Short texts of all ranks

    def exchanged(self, name: str, content: bytes) -> list[bytes]:
        """The values of all ranks under a name, in their order. Raises `TimeoutError` where one gives nothing."""
        until = time.monotonic() + self.timeout_seconds
        self.store.set(f"{name}/{self.launch.rank}", content)
        names = [f"{name}/{rank}" for rank in range(self.launch.size)]
        while not self.store.check(names):
            self.look()
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(POLL_SECONDS)
        return [self.store.get(each) for each in names]


def store_under(name: str, store: Any) -> Any:
    """The part of a store whose keys begin with a name."""
    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage] - its page says that it is public
