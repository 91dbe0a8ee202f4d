"""Launches of Triton's kernels in a dry run: nothing runs, and the trace records the launch.

PyTorch allocates what a kernel writes, so the bytes stay right. Nothing is compiled, autotuners time nothing, and
heuristics and grids are not asked: the machine may have no device and no driver of Triton.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tightfit.errors import TraceError
from tightfit.tracing.cuda.answers import DeviceProperties, shared_memory, simulated_card
from tightfit.tracing.cuda.replacements import Install, Replacements
from tightfit.tracing.dry_run import running

_DEPTH = 4  # levels of containers among a kernel's arguments


def _replace_launchers(module: ModuleType, replacements: Replacements) -> None:
    """Replace what launches a kernel in every class of a module: `kernel[grid](...)` and `kernel.run(...)`."""
    for owner in {item for item in vars(module).values() if isinstance(item, type) and _is_kernel(item)}:
        if owner.__module__ != module.__name__:
            continue  # imported from the module that has its own row
        for name in ("run", "warmup"):
            if name in vars(owner):
                replacements.replace(owner, name, _launching(getattr(owner, name)))
        if "__getitem__" in vars(owner):
            replacements.replace(owner, "__getitem__", _with_grid(owner.__getitem__))


def _is_kernel(kind: type) -> bool:
    """True if a class is one of Triton's that launch kernels, by its name: the module itself is not imported here."""
    return any(base.__name__ == "KernelInterface" for base in kind.__mro__)


def _launching(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if simulated_card() is None else _launch(self, args, kwargs)

    return run


def _with_grid(original: Callable[..., Any]) -> Callable[..., Any]:
    def launcher(self: Any, grid: Any) -> Any:
        if simulated_card() is None:
            return original(self, grid)
        return lambda *args, **kwargs: _launch(self, args, kwargs)

    return launcher


def _launch(kernel: Any, args: tuple, kwargs: Mapping[str, Any]) -> "_NotCompiled":
    name = f"triton.{kernel_name(kernel)}"
    tensors = list({id(tensor): tensor for tensor in _tensors((*args, *kwargs.values()))}.values())
    for tensor in tensors:
        tensor.data_ptr()  # as a launch does: levers that watch a tensor's memory have to see it here too
    dry = running()
    if dry is not None:
        dry.launched(name, tensors)
    return _NotCompiled(name)


class _NotCompiled:
    """The result of a launch instead of the compiled kernel."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise TraceError(f"{self._name}.{attribute} cannot be run dry: a dry run does not compile the kernel")


def kernel_name(kernel: Any) -> str:
    """The name of the function that was made a kernel, below autotuners and heuristics."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", type(kernel).__name__)


def _tensors(items: Iterable[Any], depth: int = 0) -> Iterator[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple) and depth < _DEPTH:
            yield from _tensors(item, depth + 1)
        elif isinstance(base := getattr(item, "base", None), torch.Tensor):
            yield base  # Triton's descriptor of a tensor


# Triton's driver, which kernels' packages ask for the device


class _Driver:
    """The driver of the simulated device."""

    def __init__(self, card: DeviceProperties):
        major, minor = card.capability
        self._target = SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)
        self._properties = {
            "max_shared_mem": shared_memory(card.capability),
            "max_num_regs": 65536,
            "multiprocessor_count": card.multiprocessors,
            "warpSize": 32,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(self._properties))

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")  # where the dry run's tensors are

    def get_device_interface(self) -> ModuleType:
        return torch.cuda

    def __getattr__(self, name: str) -> Any:
        raise TraceError(f"triton.runtime.driver.active.{name} cannot be run dry: there is no driver in a dry run")


class _Active:
    """The driver of whoever asks: the simulated one in a dry run, the true one in another thread."""

    def __init__(self, true: Callable[[], Any]):
        self._true = true

    def __getattr__(self, name: str) -> Any:
        card = simulated_card()
        return getattr(self._true() if card is None else _Driver(card), name)


def _replace_driver(module: ModuleType, replacements: Replacements) -> None:
    kind = type(module.driver)
    active = vars(kind).get("active")
    if isinstance(active, property):
        get = active.fget
        assert get is not None
        simulated = property(
            lambda self: get(self) if simulated_card() is None else _Active(lambda: get(self)), active.fset
        )
        replacements.replace(kind, "active", simulated)
    else:  # before Triton 3.4: an attribute
        true = module.driver.active
        replacements.replace(module.driver, "active", _Active(lambda: true))


TRITON_INSTALLERS: dict[str, Install] = {
    "triton.runtime.jit": _replace_launchers,
    "triton.runtime.autotuner": _replace_launchers,
    "triton.runtime.interpreter": _replace_launchers,
    "triton.runtime.driver": _replace_driver,
}
