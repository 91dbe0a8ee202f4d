"""Checks whether this machine can compile the C++ that PyTorch generates for a CPU."""

import os
import shutil

from tightfit.errors import DeviceError

_COMPILERS = (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")


def demand_compiler(what: str) -> None:
    """Raise `DeviceError` if there is no C++ compiler. `what` begins the message."""
    if not any(map(shutil.which, _COMPILERS)):
        raise DeviceError(f"{what}, for which the CPU needs a C++ compiler: install g++")
