"""Follows tensors that get other memory in a dry run, and gives them their own back: `p.data = 0.99 * p.data + ...`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightfit.runtime.internals import data_set_by, is_shared
from tightfit.tracing.recording import Recording


@contextmanager
def memory_given_back(dry: Recording) -> Iterator[None]:
    """A context in which code may give tensors other memory. Afterwards those that had some before have it again.

    Those that the step itself makes are no concern of it.
    """
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: the tensor, and its memory

    def assigns(tensor: torch.Tensor) -> None:
        cell = dry.ledger.cell_of(tensor)
        if id(tensor) in before or (cell is not None and dry.ledger.entries[cell.index].operator is not None):
            return
        if cell is not None and not is_shared(tensor):
            # The alias below holds the memory, which the step frees here.
            dry.ledger.take_off(tensor.untyped_storage())
        before[id(tensor)] = tensor, tensor.detach()

    try:
        with data_set_by(assigns):
            yield
    finally:
        for tensor, memory in before.values():
            tensor.data = memory
