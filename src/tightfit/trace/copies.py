"""In a dry run: the copies that a lever takes of values, outside of the memory that is counted, and their way back."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tightfit.activity import now, offload
from tightfit.operators import fresh_memory
from tightfit.trace.dry_run import DryRun
from tightfit.trace.record import OperatorRecord, Phase
from tightfit.trace.shapes import TensorShape, is_hollow

AWAY, BACK = "tightfit.offload", "tightfit.fetch"  # as operators of a trace


@contextmanager
def copies_played(dry: DryRun) -> Iterator[None]:
    """Inside, a lever that copies a value away copies nothing large, and the trace shows what it would have taken."""
    now.dry_copy = lambda tensor: copied_away(dry, tensor)
    try:
        yield
    finally:
        now.dry_copy = None


def copied_away(dry: DryRun, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Note the copy of a tensor's storage. Returns what brings it back: memory that counts, with what was known."""
    storage = tensor.untyped_storage()
    nbytes, dtype, device = storage.nbytes(), tensor.dtype, tensor.device
    content = ctypes.string_at(storage.data_ptr(), nbytes) if dry.see(tensor).known else None
    note_move(dry, AWAY, nbytes)

    def bring_back() -> torch.Tensor:
        with offload():
            memory = fresh_memory(nbytes, dtype, device)
        cell = dry.see(memory)
        cell.known = content is not None and not is_hollow(memory)
        if content is not None and cell.known:
            ctypes.memmove(memory.untyped_storage().data_ptr(), content, nbytes)
        note_move(dry, BACK, nbytes)
        return memory

    return bring_back


def note_move(dry: DryRun, name: str, nbytes: int) -> None:
    """A copy as an operator of the step: it takes time and no memory."""
    dry.begin([])
    shape = TensorShape((nbytes,), (1,), torch.uint8)
    seconds = dry.cost(name, [shape], [], ())
    phase = Phase.RECOMPUTE if now.recomputing else dry.phase
    module = dry.modules.attribute(phase)
    dry.levels.append(dry.ledger.live_bytes)
    dry.operators.append(OperatorRecord(name, phase, module, seconds, 0, None, -1, (), (), False, nbytes))
