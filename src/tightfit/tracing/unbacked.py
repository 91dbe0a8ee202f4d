"""Tensors whose memory is not there: what a dry run does not compute has a size and an address, and no byte behind it.

The addresses are of a range that no operating system can map: the processor refuses them. So nothing is reserved or
charged, and no limit counts it (strict overcommit, `ulimit -v`, a container's memory). Each tensor has addresses of its
own, as fresh memory would: whoever compares data pointers gets a true answer. Code that reads or writes there all the
same ends the process in one line (`tracing/faults.py`).
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

from tightfit.tracing.faults import FIRST_ADDRESS, LAST_ADDRESS, faults

_ALIGNMENT = 64  # of fresh memory: `gAlignment` in c10/core/alignment.h
_UNBACKED = "_tightfit_unbacked"


def unbacked_tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU of this shape and stride whose memory nobody may touch, marked so.

    Where faults cannot be reported in one line (not Linux), it is untouched memory of the allocator.
    """
    nbytes = spanned_bytes(shape, stride, dtype)
    if nbytes == 0 or not (faults.watched or faults.watch()):
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        set_unbacked(tensor)
        return tensor
    memory = torch.frombuffer(_bytes(nbytes).from_address(_addresses.fresh(nbytes)), dtype=dtype)
    set_unbacked(memory)
    tensor = memory.as_strided(shape, stride)
    return tensor.detach() if tensor._is_view() else tensor  # what autograd sees of it is no view of anything


def spanned_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to the last element."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * dtype.itemsize


def set_unbacked(tensor: torch.Tensor) -> None:
    """Mark the memory under a tensor as never written."""
    tensor.untyped_storage().__dict__[_UNBACKED] = True


def is_unbacked(tensor: torch.Tensor) -> bool:
    """Whether the memory under a tensor was made by a dry run and holds nothing."""
    return tensor.untyped_storage().__dict__.get(_UNBACKED, False)


@functools.lru_cache(1 << 12)
def _bytes(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * count


class _Addresses:
    """Mutable: which addresses come next; from the first again after 18 PB."""

    def __init__(self) -> None:
        self.next = FIRST_ADDRESS

    def fresh(self, nbytes: int) -> int:
        first, after = self.next, self.next + nbytes + -nbytes % _ALIGNMENT
        if after > LAST_ADDRESS:
            first, after = FIRST_ADDRESS, FIRST_ADDRESS + nbytes + -nbytes % _ALIGNMENT
        self.next = after
        return first


_addresses = _Addresses()
