"""A null card's figures, and the environment in which a process finds it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightfit.devices.cache import cache_folder
from tightfit.devices.described import changed, of_ones_own, read_description
from tightfit.devices.known import find, nearest
from tightfit.devices.nullcard.build import installed_torch, libraries
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import DeviceError

CONTEXT_BYTES = 512 << 20  # of a process, outside of PyTorch's allocator: assumed, as the dry run assumes it
FIGURES = "TIGHTFIT_NULLCARD"  # the variable that csrc/card.c reads; `devices.machine` knows a null card by it

Late = Literal["none", "side", "main"]
_LATE: dict[Late, int] = {"none": 0, "side": 1, "main": 2}

# The most shared memory of a block that asks for it, shared memory of a multiprocessor (bytes), threads and blocks of a
# multiprocessor, by compute capability: "Technical Specifications per Compute Capability" in the CUDA C++ Programming
# Guide. A capability that is missing takes the nearest one below.
_MULTIPROCESSOR = {
    (7, 0): (98304, 98304, 2048, 32),
    (7, 5): (65536, 65536, 1024, 16),
    (8, 0): (166912, 167936, 2048, 32),
    (8, 6): (101376, 102400, 1536, 16),
    (8, 7): (166912, 167936, 1536, 16),
    (8, 9): (101376, 102400, 1536, 24),
    (9, 0): (232448, 233472, 2048, 32),
    (10, 0): (232448, 233472, 2048, 32),
    (12, 0): (101376, 102400, 1536, 24),
}


@dataclass(frozen=True)
class Card:
    """A card that is not there.

    - `name`, `memory_bytes` (all that CUDA reports), `capability`, `multiprocessors`: as CUDA answers.
    - `count`: so many of them.
    - `context_bytes`: what a process takes of it beside its allocations.
    - `late`: which streams' work happens only when something waits for it: none's, that of all but the default stream
      (`"side"`), or the default stream's (`"main"`). What is wrong in one of the three was never ordered.
    - `most_copied`: larger copies are not made, so that a step's time is the host's; None: all are made.
    - `cudnn_workspace_bytes`: what an engine of cuDNN's is said to need.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    count: int = 1
    context_bytes: int = CONTEXT_BYTES
    late: Late = "none"
    most_copied: int | None = None
    cudnn_workspace_bytes: int = 0

    @property
    def text(self) -> str:
        """The card's description as csrc/card.c reads it, without the values that the installed PyTorch decides."""
        below = [known for known in _MULTIPROCESSOR if known <= self.capability]
        shared_block, shared, threads, blocks = _MULTIPROCESSOR[max(below, default=(7, 0))]
        figures = {
            "name": self.name.replace(";", ","),
            "memory": self.memory_bytes,
            "context": self.context_bytes,
            "count": self.count,
            "capability": self.capability[0] * 10 + self.capability[1],
            "multiprocessors": self.multiprocessors,
            "shared_block": shared_block,
            "shared_multiprocessor": shared,
            "threads": threads,
            "blocks": blocks,
            "late": _LATE[self.late],
            "cudnn_workspace": self.cudnn_workspace_bytes,
            **({} if self.most_copied is None else {"copies": self.most_copied}),
        }
        return ";".join(f"{key}={value}" for key, value in figures.items())


def card_of(device: str, memory_bytes: int | None = None) -> Card:
    """The null card of a device's text: a name of the list (`"rtx4090"`), or the user's own figures.

    Args:
        device: as `--device` takes it: `"rtx4090"`, `"rtx3080,memory=8GiB"`,
            `"memory=8GiB,bandwidth=400GB/s,fp32=20TFLOPS,capability=8.6"`.
        memory_bytes: all of its memory, instead of its own.

    Raises:
        DeviceError: the name is not known, or it is not a card.
    """
    description = read_description(device)
    if description is not None and not description.base:
        spec = of_ones_own(description)
    else:
        name = device if description is None else description.base
        known = find(name)
        if known is None:
            near = nearest(name) or ["one that `tightfit devices` shows"]
            raise DeviceError(f"device {name!r} is no card of the list: did you mean {' or '.join(near)}?")
        spec = known.spec if description is None else changed(known.spec, description)
    return _card(spec, memory_bytes)


def _card(spec: DeviceSpec, memory_bytes: int | None) -> Card:
    if spec.compute_capability is None or spec.sm_count is None:
        raise DeviceError(
            f"device {spec.name!r} is no CUDA card: a null card has a compute capability and multiprocessors"
        )
    return Card(f"NVIDIA {spec.name}", memory_bytes or spec.memory_bytes, spec.compute_capability, spec.sm_count)


def environment(card: Card, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with which a process finds the card instead of those of the machine.

    The libraries are compiled if they are not there yet.

    Args:
        card: what CUDA reports there.
        base: the variables to begin with; None: this process's.

    Raises:
        DeviceError: the card cannot be made here (see `libraries`), or the installed PyTorch has no code for it.
    """
    base = os.environ if base is None else base
    paths = libraries(cache_folder())
    folder = paths[0].parent
    torch = installed_torch()
    ours = [str(path) for path in paths]
    others = [path for path in base.get("LD_PRELOAD", "").split(":") if path and path not in ours]
    found = {
        **base,
        "LD_PRELOAD": ":".join([*ours, *others]),
        "TRITON_LIBCUDA_PATH": str(folder),
        FIGURES: f"{card.text};cuda={torch.cuda_version};cudnn={torch.cudnn_version}",
    }
    found.pop("CUDA_VISIBLE_DEVICES", None)
    built = _built_for(folder, found)
    mine = card.capability[0] * 10 + card.capability[1]
    if not any(code <= mine and code // 10 == mine // 10 for code in built):
        has = ", ".join(f"{code // 10}.{code % 10}" for code in built)
        raise DeviceError(
            f"{card.name}: this PyTorch ({torch.version}) has no code for compute capability {mine // 10}.{mine % 10}: "
            f"it has {has}; take another card or a PyTorch that was built for it"
        )
    found[FIGURES] += f";built={','.join(map(str, built))}"
    return found


def _built_for(folder: Path, variables: Mapping[str, str]) -> list[int]:
    """The capabilities for which the installed PyTorch has code, as it says itself; asked once."""
    kept = folder / "built_for"
    if not kept.exists():
        code = "import torch; print('built', torch._C._cuda_getArchFlags())"
        asked = subprocess.run([sys.executable, "-c", code], env=dict(variables), capture_output=True, text=True)
        said = [line for line in asked.stdout.splitlines() if line.startswith("built ")]
        if asked.returncode or not said:
            raise DeviceError(f"PyTorch does not start on the null card: {asked.stderr.strip()[-500:]}")
        numbers = {
            int(part.removeprefix("sm_").rstrip("af")) for part in said[-1].split()[1:] if part.startswith("sm_")
        }
        beside = kept.with_suffix(f".{os.getpid()}")
        beside.write_text(" ".join(map(str, sorted(numbers))), encoding="utf-8")
        os.replace(beside, kept)
    return [int(number) for number in kept.read_text(encoding="utf-8").split()]
