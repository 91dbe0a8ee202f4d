"""CUDA's choices, which a dry run repeats on a CPU: attention backends, optimizers' kernels, autocast's cache.

Also cuBLAS's workspaces, pinned pages, and the gradient scaler.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_BACKENDS = {0: "math", 1: "flash_attention", 2: "efficient_attention", 3: "cudnn_attention"}
# `sdp_priority_order` in ATen/Context.h
_DEFAULT_PRIORITY = ["flash_attention", "efficient_attention", "math", "cudnn_attention"]


def installed_release() -> tuple[int, int]:
    """The installed release of PyTorch, major and minor."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_attention_is_preferred() -> bool:
    """True if cuDNN's attention is preferred on its cards. Without CUDA the answer is that of a build for CUDA 13.

    Source: `check_prefer_cudnn_attention` in ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") == "1":
        return False
    version = torch.backends.cudnn.version()
    return version is None or version > 91500


def attention_priority() -> tuple[list[str], bool]:
    """The enabled attention backends in order of preference, and whether that order is the default one."""
    switches: Any = torch.backends.cuda
    enabled = {
        "math": switches.math_sdp_enabled(),
        "flash_attention": switches.flash_sdp_enabled(),
        "efficient_attention": switches.mem_efficient_sdp_enabled(),
        "cudnn_attention": switches.cudnn_sdp_enabled(),
    }
    order = [_BACKENDS[number] for number in torch._C._get_sdp_priority_order() if number in _BACKENDS]
    return [name for name in order if enabled[name]], order == _DEFAULT_PRIORITY


def fused_kernel_devices() -> list[str]:
    """The kinds of devices on which optimizers have fused kernels."""
    return _get_fused_kernels_supported_devices()


@contextmanager
def foreach_on_cpu() -> Iterator[None]:
    """A context in which optimizers choose their implementation for CPU tensors as for CUDA tensors."""
    module: Any = sys.modules["torch.optim.optimizer"]
    devices = module._get_foreach_kernels_supported_devices
    module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = devices


@contextmanager
def autocast_cache_cleared_by(clear: Callable[[], None]) -> Iterator[None]:
    """A context in which `clear` is also called whenever autocast clears its cache of cast weights."""
    original = torch.clear_autocast_cache

    def both() -> None:
        clear()
        original()

    torch.clear_autocast_cache = both
    try:
        yield
    finally:
        torch.clear_autocast_cache = original
        clear()


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a gradient scaler unscale its optimizers' gradients again, because the unscaled gradients were freed.

    One that ran out of memory while it made its two tensors makes both again.
    """
    scaler._per_optimizer_states.clear()
    if scaler._growth_tracker is None:
        scaler._scale = None


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps. Only on a build with CUDA."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces")()  # noqa: B009 (builds without CUDA do not have it)


# The stream on which this thread computes, by the number of the device. `torch.accelerator` asks more first.
current_stream: Any = torch._C._accelerator_getStream


def register_pages(address: int, nbytes: int) -> bool:
    """Pin pages of host memory for CUDA. False if there is no room. Raises `CudaError` for other failures."""
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, nbytes, 0)
    if int(status) == 2:  # cudaErrorMemoryAllocation, driver_types.h
        return False
    torch.cuda.check_error(status)
    return True


def unregister_pages(address: int) -> None:
    """Unpin pages of host memory."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostUnregister(address))
