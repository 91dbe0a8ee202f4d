"""Where a benchmark ran: machine, versions, commit, threads. Every results file holds it."""

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from tightfit.devices.machine import device_name

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, Any]:
    """Machine, versions, commit (and whether the tree differs from it), threads and the load when it was asked.

    A copy of the sources does not know its commit: whoever carries one to a machine says it in `TIGHTFIT_COMMIT`.
    """
    said = os.environ.get("TIGHTFIT_COMMIT")
    return {
        "machine": {
            "cpu": device_name("cpu"),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpu": device_name("cuda") if torch.cuda.is_available() else None,
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": _version("transformers"),
        },
        "commit": said or (git("rev-parse", "HEAD") if is_checkout() else None),
        "dirty": said is None and is_checkout() and bool(git("status", "--porcelain", "--untracked-files=no")),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }


def _version(package: str) -> str | None:
    return metadata.version(package) if importlib.util.find_spec(package) is not None else None


def is_checkout(folder: Path = ROOT) -> bool:
    """Whether a folder is a checkout of git: an archive of the sources is none."""
    return (folder / ".git").exists() and shutil.which("git") is not None


def git(*arguments: str, folder: Path = ROOT) -> str:
    """What git answers in a folder, this repository's unless another is given."""
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
