"""Unbacked tensors: results that a dry run does not compute have a size and an address, and no memory.

No operating system can map the addresses, because the processor refuses them. So the system reserves and charges
nothing, and no limit counts it (strict overcommit, `ulimit -v`, a container's memory). Each tensor has its own
addresses, like newly allocated memory, so comparing data pointers gives true answers. Code that reads or writes there
anyway ends the process with one line (`tracing/faults.py`).
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

from tightfit.tracing.faults import FIRST_ADDRESS, LAST_ADDRESS, faults

_ALIGNMENT = 64  # of fresh memory: `gAlignment` in c10/core/alignment.h
_UNBACKED = "_tightfit_unbacked"


def unbacked_tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of this shape, stride and dtype without memory, marked as unbacked."""
    nbytes = _spanned_bytes(tuple(shape), tuple(stride), dtype)
    if nbytes == 0 or not (faults.watched or faults.watch()):
        # Without our fault handler (systems other than Linux), a read would crash without a word. Use the allocator's
        # memory instead, and never touch it.
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        set_unbacked(tensor)
        return tensor
    memory = torch.frombuffer(_bytes(nbytes).from_address(_addresses.fresh(nbytes)), dtype=dtype)
    set_unbacked(memory)
    tensor = memory.as_strided(shape, stride)
    return tensor.detach() if tensor._is_view() else tensor  # autograd must not take a result for a view


def spanned_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to the last element."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * dtype.itemsize


_spanned_bytes = functools.lru_cache(1 << 14)(spanned_bytes)  # a step makes the same few shapes thousands of times


def set_unbacked(tensor: torch.Tensor) -> None:
    """Mark a tensor's storage as never written."""
    tensor.untyped_storage().__dict__[_UNBACKED] = True


def is_unbacked(tensor: torch.Tensor) -> bool:
    """Whether a dry run made the tensor's storage, so that it holds no data."""
    return is_unbacked_storage(tensor.untyped_storage())


def is_unbacked_storage(storage: torch.UntypedStorage) -> bool:
    """`is_unbacked`, of a storage."""
    return storage.__dict__.get(_UNBACKED, False)


@functools.lru_cache(1 << 12)
def _bytes(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * count


class _Addresses:
    """Mutable: the next free address. After 18 PB it starts again at the first."""

    def __init__(self) -> None:
        self.next = FIRST_ADDRESS

    def fresh(self, nbytes: int) -> int:
        first, after = self.next, self.next + nbytes + -nbytes % _ALIGNMENT
        if after > LAST_ADDRESS:
            first, after = FIRST_ADDRESS, FIRST_ADDRESS + nbytes + -nbytes % _ALIGNMENT
        self.next = after
        return first


_addresses = _Addresses()
