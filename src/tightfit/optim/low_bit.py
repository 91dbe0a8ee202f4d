"""Optimizers of other packages with states in 8 or 4 bits."""

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tightfit.errors import DeviceError, InputError
from tightfit.runtime.compilers import demand_compiler
from tightfit.runtime.internals import no_modes
from tightfit.runtime.simulation import simulation

DEVICES = ("cpu", "cuda", "xpu")
_SMALLEST = (
    4096  # elements of a parameter whose states are quantised (`_AdamBase._new_buffer` in torchao/optim/adam.py)
)


def adamw8bit(groups: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with blockwise 8-bit states (Dettmers et al. 2022, "8-bit optimizers via block-wise
    quantization"). Parameters below 4096 elements keep fp32 states.

    Raises `InputError` if the package is missing, and `DeviceError` on a device without kernels.
    """
    groups = list(groups)
    check_device("adamw8bit", groups, DEVICES)
    return _package("adamw8bit", "bitsandbytes").optim.AdamW8bit(groups, **options)


def adamw4bit(groups: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW with blockwise 4-bit states (Li et al. 2023, "Memory efficient optimizers with 4-bit states").

    Its first step compiles, which takes seconds, and on a CPU needs a C++ compiler. Raises `InputError` if the package
    is missing, and `DeviceError` on a device on which it cannot run.
    """
    groups = list(groups)
    device = check_device("adamw4bit", groups, DEVICES)
    if device == "cpu" and not simulation.is_dry:
        demand_compiler("optimizer adamw4bit compiles its step")
    return without_its_step(_package("adamw4bit", "torchao", "torchao.optim").AdamW4bit)(groups, **options)


def without_its_step(kind: type) -> type:
    """In a dry run, a replacement for torchao's compiled optimizers, whose kernels no dispatch mode sees.

    Outside of a dry run, and for any other class, the class itself.
    """
    is_torchao = any(base.__module__ == "torchao.optim.adam" for base in kind.__mro__)
    return _stand_in(kind) if simulation.is_dry and is_torchao else kind


@functools.cache
def _stand_in(kind: type) -> type:
    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    moments = {"exp_avg": True, "exp_avg_sq": False}  # the name, and whether it has a sign
                    self.state[parameter]["step"] = torch.tensor(0.0)
                    for key, signed in moments.items():
                        self.state[parameter][key] = self._new_buffer(parameter, signed)
                if parameter.grad is not None and not simulation.of_cuda:
                    torch.empty(_compiled_scratch(parameter.numel(), self.block_size), dtype=torch.uint8)

    return type(kind.__name__, (kind,), {"step": step})


def _compiled_scratch(count: int, block_size: int) -> int:
    """Bytes of scratch memory of the compiled step on a CPU for `count` elements, with 4-bit states and fp32 weights.

    Measured on one matrix of 600 x 64 (torch 2.13, torchao 0.18), where it is right to 4 bytes:
    tests/optim/test_predicted_peaks.py. The scratch memory of CUDA's kernels was not measured, and is not counted.
    """
    return 26 * count + 8 * (count // block_size) if count >= _SMALLEST else 0


def check_device(name: str, groups: Sequence[Any], known: Sequence[str]) -> str:
    """The kind of the parameters' device. Raises `DeviceError` if it is not among the known ones."""
    members = [p for item in groups for p in (item["params"] if isinstance(item, dict) else [item])]
    device = next((p.device.type for p in members), "cpu")
    if device not in known:
        raise DeviceError(f"optimizer {name} does not run on {device}: it runs on {', '.join(known)}")
    return device


def _package(name: str, package: str, module: str | None = None) -> Any:
    try:
        with no_modes():  # what a package makes when it is imported is not the step's: bitsandbytes has tables
            return importlib.import_module(module or package)
    except ImportError as error:
        raise InputError(f"optimizer {name} needs the package {package}: pip install 'tightfit[lowbit]'") from error
