"""The way between a device and the host: pinned memory and a copy stream on CUDA; plain copies where both are one."""

import torch
from torch import Tensor

from tightfit.activity import host_memory

HOST = torch.device("cpu")


class Link:
    """Copies tensors between one device and the host, on CUDA beside the computation."""

    def __init__(self, device: torch.device):
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._arrivals: dict[int, torch.cuda.Event] = {}  # by address: copies that nobody has waited for yet

    @property
    def is_concurrent(self) -> bool:
        """Whether copies go on beside what is computed."""
        return self._stream is not None

    def empty_on_host(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Host memory of a tensor's shape; pinned where the device is CUDA."""
        with host_memory():
            return torch.empty_like(
                like, dtype=dtype, device=HOST, pin_memory=self._is_cuda, memory_format=torch.preserve_format
            )

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, which `wait` must be called for before it is read."""
        target = self.empty_on_host(tensor)
        self._copy(target, tensor, tensor)
        if self._stream is not None:
            self._arrivals[target.data_ptr()] = self._event()
        return target

    def wait(self, tensor: Tensor) -> None:
        """Until the copy to `tensor`, which is in host memory, is there."""
        if self._stream is not None:
            event = self._arrivals.pop(tensor.data_ptr(), None)
            if event is not None:
                event.synchronize()

    def to_device(self, target: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Copy `source`, in host memory, over `target`; the event after which `source` may be written again."""
        self._copy(target, source, target)
        return None if self._stream is None else self._event()

    def join(self) -> None:
        """What the device computes from here on comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        on_device.record_stream(self._stream)
