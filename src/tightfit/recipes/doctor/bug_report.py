"""The contents of a fault's report: versions, the machine, the plan or the failure. Nothing in it names a folder."""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from tightfit.recipes.doctor.records import DiagnosisRecord
from tightfit.units import format_bytes
from tightfit.version import package_version

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "pytorch-lightning", "torchao", "bitsandbytes", "triton",
    "numpy", "tokenizers", "datasets",
)  # fmt: skip
SETTINGS = (  # environment variables that change what a step takes
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "WORLD_SIZE",
)  # fmt: skip
# Two parts and more of a path, as Linux, macOS and Windows write them: folders go, the last part stays.
FOLDERS = re.compile(r"(?<![\w:/.])(?:file://|~|[A-Za-z]:)?(?:[/\\][^/\\\s\"':,;()\[\]{}<>|]+)+[/\\](?=[^/\\\s]+)")
QUOTED = re.compile(r"""(["'])(?:file://|~|[A-Za-z]:)?[/\\][^"'\n]*[/\\](?=[^"'\n]*\1)""")  # these may hold spaces


def bug_report(found: DiagnosisRecord | None, plan: Mapping[str, Any] | None) -> str:
    """The report as Markdown, to be pasted into an issue."""
    lines = ["### Versions", "", *_table(versions()), "", "### Machine", "", *_table(machine())]
    if plan is not None:
        lines += ["", "### Plan", "", *_table(_plan(plan))]
    if found is not None:
        lines += ["", "### What the file says", "", *found.findings]
        lines += [f"- {name}: {format_bytes(size)}" for name, size in found.by_category.items() if size]
    return without_folders("\n".join(lines))


def versions() -> dict[str, str]:
    """The packages that matter, those that are installed."""
    import torch

    found = {"tightfit": package_version(), "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # with its build, which metadata of PyPI's wheels leave out


def machine() -> dict[str, str]:
    """The system, its devices and the settings that change what a step takes."""
    import psutil
    import torch

    from tightfit.devices.machine import device_name

    memory = psutil.virtual_memory()
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU": f"{device_name('cpu')}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "memory": f"{format_bytes(memory.total)}, {format_bytes(memory.available)} free",
        "CUDA of torch": str(torch.version.cuda),
    }
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found[f"card {index}"] = f"{properties.name}, {format_bytes(properties.total_memory)}, {capability}"
    return found | {name: os.environ[name] for name in SETTINGS if name in os.environ}


def _plan(plan: Mapping[str, Any]) -> dict[str, str]:
    sizes = ("budget_bytes", "peak_bytes", "plain_peak_bytes")
    found = {name.removesuffix("_bytes"): format_bytes(plan[name]) for name in sizes if plan.get(name)}
    named = {name: str(plan[name]) for name in ("device", "precision", "optimizer", "world_size", "micro_batches")}
    return found | named | {"levers": ", ".join(lever["name"] for lever in plan["levers"]) or "none"}


def _table(rows: Mapping[str, str]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    for name, value in rows.items():
        yield f"| {name} | {' '.join(value.split())} |"


def without_folders(text: str) -> str:
    """The text with the folders of every path replaced: they tell names of people and projects."""
    return FOLDERS.sub("…/", QUOTED.sub(r"\1…/", text))
