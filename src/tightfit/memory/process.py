"""The host's memory that this process takes beside its tensors: Python, libraries, and what they hold."""

import ctypes
import gc
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tightfit.memory.allocator import cpu_rise, storage_bytes
from tightfit.memory.counters import this_process

# From these sizes on, memory that is freed goes back to the system at once (`give_back_at_once`). glibc's own limit
# rises to 32 MiB with the sizes that a program frees, and its heap then holds what a step has freed in pieces. With
# 256 KiB, activations of few tokens (128 KiB each) left holes of 61 MB in the heap of a 1B's training.
THRESHOLD_BYTES = 1 << 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


class _Malloc:
    """Mutable, one instance: whether this process gives back memory at once."""

    gives_back = False


_malloc = _Malloc()


def process_bytes(held: Iterable[Tensor], *, tidied: bool) -> int:
    """Resident bytes of this process beside the tensors that are `held`, if `tidied` with free memory given back.

    Tidying takes a quarter of a second where many libraries are imported: it is for those who asked for a budget.

    What libraries load and allocate when a first step computes is there already: a small one is run before. Where
    memory is given back at once, what is free is pieces between small objects, which the next step's objects fill.
    """
    _computed_once()
    if tidied:
        gc.collect()  # of a search for a plan, which no step has
        if not _malloc.gives_back:
            give_back()
    on_host = [tensor for tensor in held if tensor.device.type == "cpu"]
    return max(0, resident_bytes() - storage_bytes(on_host))


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    return this_process().memory_info().rss


def give_back() -> None:
    """Return free memory to the system. Does nothing where the C library is not glibc."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def give_back_at_once() -> bool:
    """From here on, memory of a tensor returns to the system when it is freed, so the process takes no more than it
    uses. New memory costs page faults. False where the C library is not glibc, which then decides.
    """
    option = _glibc("mallopt")
    if option is None:
        return False
    gc.collect()
    give_back()
    set_both = [option(_M_MMAP_THRESHOLD, THRESHOLD_BYTES), option(_M_TRIM_THRESHOLD, THRESHOLD_BYTES)]
    _malloc.gives_back = all(set_both)
    return _malloc.gives_back


def _glibc(name: str) -> Any:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), name, None)


@cache
def _computed_once() -> None:
    """Let PyTorch and the libraries below it start threads and make buffers, as a first step does."""
    if torch.is_inference_mode_enabled():
        return
    threads = 4 * torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        layer = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
        optimizer = torch.optim.AdamW(layer.parameters())

        def step() -> None:
            layer(torch.zeros(64 * threads, 256)).square().mean().backward()
            optimizer.step()

        cpu_rise(step)
