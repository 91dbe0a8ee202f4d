"""The settings of the device's caching allocator, and the record of the CPU's."""

import os
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch._C._profiler import _EventType

_allocator_words: list[str] = []  # the last argument of `set_allocator_settings`, if any


def allocator_settings() -> str:
    """The present settings of the device's allocator, in the words of `PYTORCH_ALLOC_CONF`."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return ask()
    # torch 2.11 has no such question (2.12 has). Answer what was set here, else the variables in the order in which
    # torch reads them.
    if _allocator_words:
        return _allocator_words[-1]
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def set_allocator_settings(words: str) -> None:
    """Set the device allocator's settings. Raises `ValueError` or `RuntimeError` if torch refuses them."""
    torch._C._accelerator_setAllocatorSettings(words)
    _allocator_words[:] = [words]


def recorded_allocations(profile: torch.profiler.profile) -> Iterator[tuple[int, int]]:
    """Address and bytes of what the CPU's allocator gave out and took back in an ended profile with `profile_memory`.

    They come in the order of time. What was taken back has negative bytes.
    """
    results: Any = profile.profiler and profile.profiler.kineto_results
    assert results is not None, "the profile has ended"
    found = sorted(_allocations(results.experimental_event_tree()), key=itemgetter(0))
    return ((address, nbytes) for _, address, nbytes in found)


def _allocations(events: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, address and bytes of the allocator's events in a profile's tree, those of one thread in their order."""
    waiting = list(reversed(events))
    while waiting:
        event = waiting.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                yield event.start_time_ns, fields.ptr, fields.alloc_size
        elif event.children:
            waiting += reversed(event.children)
