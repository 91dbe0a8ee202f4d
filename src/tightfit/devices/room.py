"""Measurements on a card that take a share of its free memory at most, whatever they would take with all of it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from tightfit.memory.failure import is_out_of_memory
from tightfit.runtime.internals import clear_cublas_workspaces

SHARE = 0.25  # of the free memory: other processes have the rest, and the user's own work in this one
Size = TypeVar("Size")
Result = TypeVar("Result")


class NoRoom(Exception):
    """A measurement does not fit in its share of the free memory, however small it is made."""


@contextmanager
def share_of_free_memory() -> Iterator[None]:
    """A context in which PyTorch's allocator reserves no more than a share of what is free at its beginning, beside
    what it has reserved already. What the measurements reserve is released at the end.
    """
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + SHARE * free
    torch.cuda.set_per_process_memory_fraction(min(before, limit / total))
    try:
        yield
    finally:
        gc.collect()
        clear_cublas_workspaces()  # each holds the segment that it lies in
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(before)


def largest_that_fits(
    size: Size | None, made: Callable[[Size], Result], smaller: Callable[[Size], Size | None]
) -> tuple[Size, Result]:
    """The result of `made` for the first size that does not run out of memory, and that size. Raises `NoRoom`."""
    while size is not None:
        try:
            return size, made(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        gc.collect(1)  # what the failed size held is young
        size = smaller(size)
    raise NoRoom
