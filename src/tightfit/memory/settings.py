"""Settings of CUDA's caching allocator, made before CUDA starts; and a pool of its own for what is passing.

Fragmentation is memory that is reserved and cannot be used: free pieces of segments, each too small for what is asked.
With expandable segments the allocator maps memory to the end of one long range of addresses, page by page, so that
hardly any such pieces arise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightfit.errors import DeviceError, InputError
from tightfit.names.allocator import parse_allocator
from tightfit.runtime.internals import allocator_settings, set_allocator_settings

# The name that torch reads, and the older one, which it still reads.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_allocator(setting: str) -> str:
    """Set up CUDA's allocator for this process and those that it starts; returns the setting in PyTorch's words.

    `setting` is `expandable_segments`, or `key:value` with commas between, as in `PYTORCH_ALLOC_CONF`. Where there is
    no CUDA it changes nothing that is used. Raises `InputError` for a setting that is none, or that the environment
    contradicts, and `DeviceError` where CUDA has started with another one.

    Example:
        >>> import tightfit
        >>> tightfit.set_allocator("expandable_segments")
        'expandable_segments:True'
    """
    try:
        words = parse_allocator(setting)
    except ValueError as error:
        raise InputError(str(error)) from None
    for variable in VARIABLES:
        present = os.environ.get(variable, words)
        if present.replace(" ", "") != words.replace(" ", ""):
            raise InputError(f"allocator {setting!r}: {variable} is set to {present!r} already: take one of them away")
    if allocator_settings() == words:
        return words
    if torch.cuda.is_initialized():
        raise DeviceError(
            f"allocator {setting!r}: CUDA has started in this process already, with other settings: set it before the "
            f"first tensor is on the device, or start Python with {VARIABLES[0]}={words}"
        )
    try:
        set_allocator_settings(words)  # torch may have read its environment when it was imported
    except (ValueError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        raise InputError(f"allocator {setting!r}: {said}") from error
    os.environ[VARIABLES[0]] = words
    return words


@contextmanager
def private_pool(device: torch.device | str) -> Iterator[None]:
    """What is allocated inside, in this thread, comes from a pool of its own (`torch.cuda.MemPool`) on CUDA.

    For work that passes and is of other sizes than a step: when it is done and its tensors are gone, its memory goes
    back whole, and no piece of it stands between the segments of the steps that follow. On other devices: nothing.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, torch.device(device)):
        yield
