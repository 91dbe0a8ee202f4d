"""Checks whether this machine can build what PyTorch's compiler writes: C++ for a CPU, Triton's kernels for a card."""

import os
import shutil

from torch import nn
from torch.utils._triton import has_triton_package

from tightfit.errors import DeviceError

_COMPILERS = (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")


def device_of(model: nn.Module) -> str:
    """The kind of device on which a model computes: that of its first weight, or a CPU."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def demand_compiler(what: str, device: str = "cpu") -> None:
    """Raise `DeviceError` if there is no C++ compiler, or for a card no Triton. `what` begins the message."""
    if device == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise DeviceError(f"{what}, for which the CPU needs a C++ compiler: install g++")
    if device == "cuda" and not has_triton_package():
        raise DeviceError(f"{what}, for which a card needs Triton: install the package triton")
