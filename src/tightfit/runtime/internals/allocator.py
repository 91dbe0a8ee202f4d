"""The settings of the device's caching allocator."""

import os

import torch

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
