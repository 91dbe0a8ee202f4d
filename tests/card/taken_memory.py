"""A card that is full at one operator: PyTorch's allocator itself runs out of memory there."""

import ctypes
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.runtime.outside import outside

SMALLEST = 512  # bytes: what the allocator hands out


class FullAt(TorchDispatchMode):
    """While an operator with one of these numbers runs, counted from 0, others hold all that is left of the card.

    `count` is how many operators came by, `allocating` the numbers of those that took memory of the card, `raised` how
    often that ran out.
    """

    def __init__(self, *numbers: int):
        super().__init__()
        self._numbers = frozenset(numbers)
        self.count = self.raised = 0
        self.allocating: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if outside.depth:  # a plan is being made: it runs no operator of the training
            return func(*args, **(kwargs or {}))
        number = self.count
        self.count += 1
        taken = all_that_is_left() if self._is_full_at(number) else []
        before = _allocations()
        try:
            return func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self.raised += 1
            raise
        finally:
            if _allocations() > before:
                self.allocating.append(number)
            taken.clear()

    def _is_full_at(self, number: int) -> bool:
        return number in self._numbers


class FullFrom(FullAt):
    """The same from one operator on, until memory has run out once: at the first one that takes memory."""

    def _is_full_at(self, number: int) -> bool:
        return not self.raised and any(number >= first for first in self._numbers)


def held_outside(left_bytes: int) -> None:
    """Let something outside of PyTorch's allocator hold the card, but for so many bytes, until this process ends."""
    bytes_taken = torch.cuda.mem_get_info()[0] - left_bytes
    error = ctypes.CDLL("libcudart.so." + str(torch.version.cuda).split(".")[0]).cudaMalloc(
        ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(bytes_taken)
    )
    assert not error, "the card has so many bytes"


def _allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def all_that_is_left() -> list[torch.Tensor]:
    """Tensors that fill the card and every gap in what the allocator holds of it."""
    taken = []
    size = 1 << torch.cuda.mem_get_info()[1].bit_length()
    while size >= SMALLEST:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken
