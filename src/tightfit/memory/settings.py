"""Sets up CUDA's caching allocator before CUDA starts, and gives temporary work a private pool.

Fragmentation is memory that is reserved and cannot be used: free pieces of segments, each too small for the request.
With expandable segments the allocator maps memory page by page to the end of one long address range, so that hardly any
such pieces arise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightfit.errors import DeviceError, InputError
from tightfit.names import parse_allocator
from tightfit.runtime.internals import allocator_settings, set_allocator_settings

# The name that torch reads, and the older one, which it still reads.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_allocator(setting: str) -> str:
    """Set up CUDA's allocator for this process and its child processes. Without CUDA it has no effect.

    Args:
        setting: `"expandable_segments"`, or pairs `key:value` separated by commas, as in `PYTORCH_ALLOC_CONF`.

    Returns:
        The setting in PyTorch's words.

    Raises:
        InputError: The setting is invalid, or the environment contradicts it.
        DeviceError: CUDA has started with another setting.

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
            raise InputError(f"allocator {setting!r}: {variable} is set to {present!r} already: remove one of them")
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
    """A context in which this thread allocates from a private pool (`torch.cuda.MemPool`) on CUDA.

    Use it for temporary work with other sizes than a training step. When its tensors are freed, whole segments are
    returned to the device, and no piece remains between the segments of later steps. On other devices it does nothing.
    """
    device = torch.device(device)
    if device.type != "cuda":
        yield
        return
    if device.index is None:  # which `use_mem_pool` does not take
        device = torch.device("cuda", torch.cuda.current_device())
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device):
        yield
