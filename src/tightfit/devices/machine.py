"""What this machine is called and what makes two machines different for a calibration."""

import hashlib
import platform
from pathlib import Path

import torch

from tightfit.devices.spec import Kind

FORMAT = 2  # of the figures: raised when what is measured, or how, changes


def device_name(kind: Kind) -> str:
    """What the maker calls the CPU or the current CUDA device."""
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return _cpu_model() or platform.processor() or platform.machine()


def _cpu_model() -> str | None:
    """From /proc/cpuinfo, which only Linux has."""
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
