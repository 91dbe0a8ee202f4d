"""Plays collectives of `torch.distributed` in a dry run: nothing is sent, and all other processes seem to answer."""

from collections.abc import Callable
from typing import Any

import torch

from tightfit.runtime.internals import finished_work
from tightfit.runtime.operators import Traits, tensors_among
from tightfit.runtime.simulation import simulation
from tightfit.tracing.recording import Recording
from tightfit.tracing.shapes import TensorShape


def simulate_collective(
    dry: Recording, func: Any, traits: Traits, args: tuple, kwargs: dict, compute: Callable[..., Any]
) -> Any:
    """A collective's results, as if all other processes had sent their parts.

    It writes into memory that its caller allocated. `compute` runs it for real, where the numbers are known.
    """
    written = tensors_among(args[:1])
    tensors = [*written, *tensors_among(args[1:])]
    cells = [dry.see(tensor) for tensor in tensors]
    index = dry.begin(tensors)
    reads, makes = tuple(cell.value for cell in cells), []
    if all(cell.known for cell in cells):
        compute(traits, func, args, kwargs)  # DDP compares shapes, and sends the order of its buckets
    else:
        for tensor in written:
            cell = dry.see(tensor)
            cell.known = False
            makes.append(dry.ledger.new_value(cell, index))
    shapes = [TensorShape.of(tensor) for tensor in tensors]
    # On a card, NCCL uses the memory of its communicator, and no call allocates any.
    scratch = 0 if simulation.of_cuda else gloo_scratch(traits.name, shapes)
    seconds = dry.cost(traits.name, shapes, [], ())
    dry.note(traits.name, seconds, reads=reads, makes=tuple(makes), scratch_bytes=scratch)
    returns = len(func._schema.returns)
    if not returns:
        return None
    work = finished_work(written)
    return work if returns == 1 else (args[0], work)


def gloo_scratch(name: str, tensors: list[TensorShape]) -> int:
    """Bytes of PyTorch's allocator that gloo holds while a collective runs, besides its arguments.

    Measured with 2, 3 and 4 processes (benchmarks/ranks.py): what all processes give is gathered into a copy of the
    result, and what is reduced for one process is reduced in a copy of the whole. Besides, gloo has buffers of its own,
    of at most 2 MB, which no allocator counts.
    """
    if name == "c10d._allgather_base_.default":
        return tensors[0].bytes
    if name == "c10d._reduce_scatter_base_.default":
        # FSDP2 reduces to a mean, except in fp16. Gloo divides by a number in 8 bytes, and by one in the dtype.
        divisor = 0 if tensors[1].dtype == torch.float16 else 8 + tensors[1].dtype.itemsize
        return tensors[1].bytes + divisor
    return 0
