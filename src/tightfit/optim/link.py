"""Copies between a device and the host: pinned memory and a copy stream on CUDA, plain copies on a CPU.

Gradients and states of weights that are streamed from a file are in that file.
"""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tightfit.runtime.simulation import host_memory, simulation
from tightfit.runtime.streams import CudaStreams

HOST = torch.device("cpu")
# Trained weights that are on the device only while their block runs, and what makes memory beside each: not as an
# attribute, which would be pickled with a weight.
_streamed = WeakIdKeyDictionary()


class Place(Protocol):
    """Where streamed weights are while their blocks do not run."""

    @property
    def is_file(self) -> bool:
        """True if that is a file, and not host memory of a card."""
        ...

    @property
    def is_of_card(self) -> bool:
        """True if blocks run on a card, so that some weights are there when they are updated."""
        ...

    def empty(self, like: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        """Memory in that file, of a tensor's shape. Raises `LeverError`, which says `what` has no room."""
        ...


def note_streamed(weight: Tensor, place: Place) -> None:
    """Note that a trained weight's memory is at a place of the host, and on the device while its block runs."""
    _streamed[weight] = weakref.ref(place)  # the place has the weight


def forget_streamed(weight: Tensor) -> None:
    """Note that a weight is on its device for good."""
    _streamed.pop(weight, None)


def is_streamed(weight: Tensor) -> bool:
    """True if a trained weight's memory changes between host and device (`levers/stream`)."""
    return weight in _streamed


def file_of(weight: Tensor) -> Place | None:
    """The place of a trained weight that is streamed from a file; None for other weights."""
    place = _streamed[weight]() if weight in _streamed else None
    return place if place is not None and place.is_file else None


class Link:
    """Copies tensors between one device and the host, on CUDA in parallel with the computation."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams = CudaStreams(device) if device.type == "cuda" else None
        self._lane: Any = None if self._streams is None else self._streams.new()
        self._arrivals: dict[int, Any] = {}  # events of copies not waited for yet, by address

    @property
    def is_concurrent(self) -> bool:
        """True if copies run in parallel with the computation."""
        return self._streams is not None

    def empty_on_host(self, like: Tensor, dtype: torch.dtype | None = None, *, pinned: bool = True) -> Tensor:
        """Uninitialised host memory of a tensor's shape; pinned if the device is CUDA, unless `pinned` is False."""
        with host_memory(pinned=pinned):
            pinned = pinned and self.device.type == "cuda"
            return torch.empty_like(
                like, dtype=dtype, device=HOST, pin_memory=pinned, memory_format=torch.preserve_format
            )

    def to_host(self, tensor: Tensor, target: Tensor | None = None) -> Tensor:
        """Begin a copy to host memory, new or `target`. Call `wait` before you read it."""
        target = self.empty_on_host(tensor) if target is None else target
        event = self._copy(target, tensor, tensor)
        if event is not None:
            self._arrivals[target.data_ptr()] = event
        return target

    def wait(self, tensor: Tensor) -> None:
        """Wait until the copy to `tensor`, in host memory, is complete."""
        event = self._arrivals.pop(tensor.data_ptr(), None)
        if event is not None and self._streams is not None:
            self._streams.finish(event)
        elif event is not None:
            event.synchronize()

    def to_device(self, target: Tensor, source: Tensor) -> Any:
        """Copy `source`, in host memory, over `target`. Returns the event after which `source` may be written again;
        None means now.
        """
        return self._copy(target, source, target)

    def in_file(self, *tensors: Tensor) -> None:
        """Tensors of a card's training that were in a file were read there, or written; the file's clock counts it."""
        if simulation.link is not None:
            simulation.link.in_file(tensors)

    def join(self) -> None:
        """Make everything that the device computes from here on wait for all copies."""
        if simulation.link is not None:
            simulation.link.wait()
        elif self._streams is not None:
            self._streams.wait(self._streams.current(), self._streams.mark(self._lane))

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> Any:
        if simulation.link is not None:
            return simulation.link.copy(target, source, to_host=on_device is source)
        if self._streams is None:
            target.copy_(source)
            return None
        self._streams.wait(self._lane, self._streams.mark(self._streams.current()))
        self._streams.copy(self._lane, (target, source))
        # The allocator may free the tensor on the computing stream while the copy still uses it.
        on_device.record_stream(self._lane)
        return self._streams.mark(self._lane)
