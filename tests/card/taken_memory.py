"""A card that is full at one operator: PyTorch's allocator itself runs out of memory there."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.runtime.outside import outside

SMALLEST = 512  # bytes: what the allocator hands out


class FullAt(TorchDispatchMode):
    """While an operator with one of these numbers runs, counted from 0, others hold all that is left of the card.

    `allocating` are the numbers of the operators that took memory of the card, `raised` how often that ran out.
    """

    def __init__(self, *numbers: int):
        super().__init__()
        self._numbers = frozenset(numbers)
        self._count = self.raised = 0
        self.allocating: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if outside.depth:  # a plan is being made: it runs no operator of the training
            return func(*args, **(kwargs or {}))
        number = self._count
        self._count += 1
        taken = all_that_is_left() if number in self._numbers else []
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
