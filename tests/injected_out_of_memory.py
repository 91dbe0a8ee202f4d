"""Out of memory at a chosen operator, as the allocators raise it."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.runtime.outside import outside

CPU_WORDS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4194304 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 2.00 MiB is free. "
    "Including non-PyTorch memory, this process has 7.99 GiB memory in use. Of the allocated memory 7.00 GiB is "
    "allocated by PyTorch, and 128.00 MiB is reserved by PyTorch but unallocated."
)


def cpu_error() -> Exception:
    return RuntimeError(CPU_WORDS)


def cuda_error() -> Exception:
    return torch.OutOfMemoryError(CUDA_WORDS)


class OutOfMemoryAt(TorchDispatchMode):
    """In the place of the operators with these numbers, counted from 0 since it was entered, memory runs out.

    `count` is how many operators came by, `raised` how often memory ran out.
    """

    def __init__(self, *numbers: int, error: Any = cpu_error):
        super().__init__()
        self._numbers, self._error = frozenset(numbers), error
        self.count = self.raised = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if outside.depth:  # a plan is being made: it runs no operator of the training
            return func(*args, **(kwargs or {}))
        number = self.count
        self.count += 1
        if number in self._numbers:
            self.raised += 1
            raise self._error()
        return func(*args, **(kwargs or {}))
