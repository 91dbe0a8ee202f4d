"""Inductor's code for a card that is not here: Python around Triton's kernels, written without a driver or Triton."""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from tightfit.runtime.internals.kernels import replaced


def on_card(inputs: Sequence[Any]) -> list[Any]:
    """Fake tensors of a CPU as those of a card, with the same layouts."""
    from torch._guards import detect_fake_mode  # takes seconds to import

    shapes = detect_fake_mode(inputs)
    assert shapes is not None, "graphs are recorded on fake tensors"
    with shapes:
        return [_moved(each) if isinstance(each, torch.Tensor) else each for each in inputs]


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that lies as another one does: inductor asks how far its first element is from an alignment."""
    begin = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(begin + 1 + last if tensor.numel() else 0, dtype=tensor.dtype, device=_card())
    return memory.as_strided(tensor.shape, tensor.stride(), begin)


def _card() -> torch.device:
    return torch.device("cuda", 0)  # with a number: PyTorch would ask the driver for the present one


def interpreter_of(module: Any, *, is_on_card: bool) -> torch.fx.Interpreter:
    """Runs a graph; on a card, whose operators that name the CPU, where it was recorded, name the card."""
    return _OnCard(module) if is_on_card else torch.fx.Interpreter(module)


class _OnCard(torch.fx.Interpreter):
    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> tuple[tuple, dict]:
        found: Any = map_aggregate(super().fetch_args_kwargs_from_env(n), _device_of_card)
        return found


def _device_of_card(argument: Any) -> Any:
    return _card() if isinstance(argument, torch.device) and argument.type == "cpu" else argument


@contextmanager
def inductor_on(properties: Any) -> Iterator[None]:
    """A context in which inductor writes code for the card with these properties, whichever this machine has.

    It asks a device's interface, which asks the driver. That there is Triton it asks too, but only kernels need it.
    """
    from torch._dynamo.device_interface import CudaInterface  # these take seconds to import
    from torch._inductor import scheduler, utils
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    capability = properties.major, properties.minor
    as_number = 10 * properties.major + properties.minor
    names = ("regs_per_multiprocessor", "max_threads_per_multi_processor", "max_threads_per_block", "warp_size")
    described = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=properties.multi_processor_count,
        cc=as_number,
        major=properties.major,
        **{name: getattr(properties, name) for name in names if name in DeviceProperties._fields},
    )
    answers = (
        (DeviceProperties, "create", described),
        (CudaInterface, "get_device_properties", properties),
        (CudaInterface, "get_compute_capability", as_number),
        (CudaInterface, "is_bf16_supported", capability >= (8, 0)),
        (CudaInterface, "current_device", 0),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", capability),
        (torch.cuda, "current_device", 0),
        (scheduler, "has_triton", True),
        (utils, "is_big_gpu", False),  # of products that inductor would tune, and remembered by number
        (_triton, "triton_hash_with_backend", ""),
    )
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(replaced(owner, name, _in_this_thread(getattr(owner, name), answer)))
        stack.enter_context(replaced(torch.Tensor, "copy_", _copied_without_switch))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of what that card could do besides, such as TF32
        yield


_copy = torch.Tensor.copy_


def _copied_without_switch(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """In the place of `copy_`, which switches to a fake tensor's card, and so fails in a build for CPUs."""
    copy = torch.ops.aten.copy_.default if isinstance(self, FakeTensor) else _copy
    return copy(self, source, non_blocking)


def _in_this_thread(original: Any, answer: Any) -> Any:
    """A function with one answer for this thread: another one may train on a real card meanwhile."""
    asking = threading.get_ident()
    return staticmethod(
        lambda *args, **kwargs: answer if threading.get_ident() == asking else original(*args, **kwargs)
    )
