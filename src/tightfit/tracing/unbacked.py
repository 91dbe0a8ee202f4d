"""Unbacked tensors: results that a dry run does not compute have a size and an address, and no memory.

Nothing is mapped at the addresses. So the system reserves and charges nothing, and no limit counts it (strict
overcommit, `ulimit -v`, a container's memory). Each tensor has its own addresses, like newly allocated memory, so
comparing data pointers gives true answers. Code that reads or writes there anyway gets a `TraceError`
(`tracing/faults.py`).
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from tightfit.tracing.faults import FIRST_ADDRESS, FIRST_REFUSED, LAST_ADDRESS, LAST_REFUSED, faults

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
    memory = torch.frombuffer(_addresses.fresh(nbytes), dtype=dtype)
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
    """True if a dry run made the tensor's storage, so that it holds no data."""
    return is_unbacked_storage(tensor.untyped_storage())


def is_unbacked_storage(storage: torch.UntypedStorage) -> bool:
    """`is_unbacked`, of a storage."""
    return storage.__dict__.get(_UNBACKED, False)


_REGION = 1 << 40  # bytes


class _Addresses:
    """Mutable: the next free address, and those of the live tensors in each region of the range.

    The regions are used in turn, and again where no tensor is alive. What does not fit gets addresses that are refused:
    18 PB of them, and then the first ones again.
    """

    def __init__(self) -> None:
        self.alive: list[set[int]] = [set() for _ in range((LAST_ADDRESS - FIRST_ADDRESS) // _REGION)]
        self.next, self.end = FIRST_ADDRESS, FIRST_ADDRESS + _REGION
        self.refused = FIRST_REFUSED

    def fresh(self, nbytes: int) -> "ctypes.Array[ctypes.c_char]":
        """New addresses. They are free again when the result is."""
        needed = nbytes + -nbytes % _ALIGNMENT
        if self.next + needed > self.end and (needed > _REGION or not self._begin_region()):
            if self.refused + needed > LAST_REFUSED:
                self.refused = FIRST_REFUSED
            first, self.refused = self.refused, self.refused + needed
            return (ctypes.c_char * nbytes).from_address(first)
        first, self.next = self.next, self.next + needed
        self.alive[(first - FIRST_ADDRESS) // _REGION].add(first)
        return _bytes(nbytes).from_address(first)

    def _begin_region(self) -> bool:
        """Go on in the next region without live tensors. False if there is none."""
        count = len(self.alive)
        last = (self.end - FIRST_ADDRESS) // _REGION - 1
        for step in range(1, count + 1):
            region = (last + step) % count
            if not self.alive[region]:
                self.next = FIRST_ADDRESS + region * _REGION
                self.end = self.next + _REGION
                return True
        return False


_addresses = _Addresses()


@functools.lru_cache(1 << 12)
def _bytes(count: int) -> "type[ctypes.Array[ctypes.c_char]]":
    return type("_Bytes", (ctypes.c_char * count,), {"__del__": _release})


def _release(
    memory: "ctypes.Array[ctypes.c_char]",
    alive: list[set[int]] = _addresses.alive,
    address_of: "Callable[[ctypes.Array[ctypes.c_char]], int]" = ctypes.addressof,
) -> None:
    """Note that a tensor's addresses are free. Defaults, because Python may have ended the modules before."""
    first = address_of(memory)
    alive[(first - FIRST_ADDRESS) // _REGION].discard(first)
