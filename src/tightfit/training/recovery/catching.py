"""Runs a part of a step and catches out of memory, so that nothing of the part is held when the caller goes on.

Inside an `except`, the traceback holds the frames that were running and they hold their tensors: memory that is to be
made free stays in use (accelerate's `find_executable_batch_size`, pytorch#18853). Here the error is taken apart before
`caught` returns, and the caller recovers outside of the `except`.
"""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.errors import RecoveryError
from tightfit.memory.failure import OutOfMemory, is_out_of_memory, parse_out_of_memory
from tightfit.runtime.internals import forget_interrupted_backward

TRIES = 4
MOST_SPARED = 0.95  # of what is there: what fragmentation leaves unusable


@dataclass(frozen=True)
class Failure:
    """An out of memory that was caught: what the allocator said, in one line and in figures where it had some."""

    line: str
    memory: OutOfMemory | None = None

    @property
    def room_bytes(self) -> int | None:
        """Bytes that tensors can have on the device at most, as far as the message says it; None where it does not."""
        memory = self.memory
        if memory is None or memory.allocated_bytes is None or memory.free_bytes is None:
            return None
        return int(MOST_SPARED * (memory.allocated_bytes + memory.free_bytes + (memory.unallocated_bytes or 0)))

    def __str__(self) -> str:
        if self.memory is None:
            return "out of memory"
        asked = self.memory.requested_bytes
        return f"out of memory on {self.memory.device}{'' if asked is None else f' (asked for {asked:,} bytes)'}"


def caught(call: Callable[[], None], device: torch.device) -> Failure | None:
    """Run `call`. Where it runs out of memory: what was said of that, with all that the call held let go.

    Every other error goes through.
    """
    failure = None
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        text = str(error)
        failure = Failure(text.splitlines()[0] if text else type(error).__name__, parse_out_of_memory(text))
        _take_apart(error)
    if failure is not None:
        free_memory(device)
    return failure


def insist(call: Callable[[], Any], device: torch.device) -> Any:
    """The result of `call`, which takes next to no memory and may be repeated. Raises `RecoveryError` where there is
    not even that much.
    """
    results: list[Any] = []
    failure = None
    for _ in range(TRIES):
        failure = caught(lambda: results.append(call()), device)
        if failure is None:
            return results[0]
    raise RecoveryError(
        f"{failure}, when next to nothing was needed: another process takes the memory; stop it, and resume from the "
        "newest checkpoint"
    )


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds: nodes of an interrupted backward, cycles, and cached segments of a card."""
    forget_interrupted_backward()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _take_apart(error: BaseException) -> None:
    """Let go of the frames of an error and of those that it came from: their locals are the step's tensors."""
    chain: list[BaseException] = [error]
    for each in chain:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        chain += [e for e in (each.__context__, each.__cause__) if e is not None and all(e is not c for c in chain)]
