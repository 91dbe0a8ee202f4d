"""Identifies this machine: its name, and a fingerprint of everything on which a calibration depends."""

import hashlib
import platform
from pathlib import Path

import torch

from tightfit.devices.spec import Kind

FORMAT = 6  # of the figures: increased when the measurements change, or the executor that they measure


def device_name(kind: Kind) -> str:
    """The maker's name of the CPU or of the current CUDA device."""
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return _cpu_model() or platform.processor() or platform.machine()


def _cpu_model() -> str | None:
    """The CPU's model from /proc/cpuinfo, which only Linux has."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def fingerprint(kind: Kind) -> str:
    """Twelve hexadecimal digits that change with the machine, the PyTorch version and the threads in use."""
    facts = (FORMAT, kind, device_name(kind), platform.machine(), platform.system(), torch.__version__)
    settings = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    return hashlib.sha256(repr((facts, settings)).encode()).hexdigest()[:12]
