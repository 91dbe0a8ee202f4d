"""Transfers of values between a CUDA device and the host: how many are in flight, and which stream waits for which.

Each direction has its own stream beside the computing one. The allocator never sees memory used by another stream:

- Memory that a copy reads is held until the computing stream has been made to wait for that copy.
- Memory that a copy writes is allocated by the computing stream. It is freed after the computing stream has been made
  to wait for that copy.

`record_stream` would free memory whenever a copy finishes, so the peak would depend on the speed of the link. Here the
bytes in use do not depend on it, and a dry run predicts them. At most as many bytes as the largest block offloads are
in flight each way.
"""

import threading
import weakref
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from tightfit.memory.pinned import PinnedBuffer
from tightfit.memory.pool import Lease
from tightfit.runtime.activity import offload
from tightfit.runtime.internals import is_shared
from tightfit.runtime.operators import fresh_memory
from tightfit.runtime.streams import CudaStreams

OUT, IN = "out", "in"


class HostTransfer(Protocol):
    """One value's copies to the host and back. The copy to the host begins when the object is made."""

    def left(self) -> None:
        """Make everything computed from here on wait for the copy to the host."""
        ...

    def bring(self) -> torch.Tensor:
        """Begin the copy back, into new memory."""
        ...

    def arrived(self) -> None:
        """Make everything computed from here on wait for the copy back."""
        ...


class Lanes:
    """The two copy streams of a device."""

    def __init__(self, streams: CudaStreams):
        self.streams = streams
        self.out, self.back = streams.new(), streams.new()


class CudaTransfer:
    """Copies a storage's bytes to a pinned buffer and back."""

    def __init__(self, lanes: Lanes, buffer: PinnedBuffer, tensor: torch.Tensor):
        self._lanes, self._buffer = lanes, buffer
        self._dtype, self._device = tensor.dtype, tensor.device
        self._nbytes = buffer.bytes.numel()
        streams, lane = lanes.streams, lanes.out
        self._owner = streams.current()  # the stream to which the value's memory belongs
        streams.wait(lane, streams.mark(self._owner))  # the value must be computed before it is copied
        if IN in buffer.uses:
            streams.wait(lane, buffer.uses[IN])  # the pool reuses buffers: the last value must have been read from it
        with offload():
            streams.copy(lane, buffer.bytes.untyped_storage(), tensor.untyped_storage())
        self._sent = buffer.uses[OUT] = streams.mark(lane)
        self._landed: Any = None

    def left(self) -> None:
        self._hold_back(self._sent)

    def bring(self) -> torch.Tensor:
        streams, lane = self._lanes.streams, self._lanes.back
        self._owner = streams.current()
        with offload():
            content = fresh_memory(self._nbytes, self._dtype, self._device)
            # The allocator may have given out memory that kernels queued on the computing stream still use.
            streams.wait(lane, streams.mark(self._owner))
            streams.wait(lane, self._sent)  # the buffer must be filled before it is read
            streams.copy(lane, content.untyped_storage(), self._buffer.bytes.untyped_storage())
        self._landed = self._buffer.uses[IN] = streams.mark(lane)
        return content

    def arrived(self) -> None:
        self._hold_back(self._landed)

    def _hold_back(self, event: Any) -> None:
        """Make the current stream wait for the event, and the stream that owns the copied memory, if it is another."""
        streams = self._lanes.streams
        streams.wait(self._owner, event)
        if streams.current() != self._owner:
            streams.wait(streams.current(), event)


class _Departure(NamedTuple):
    """A value whose memory on the device is held until the computation waits for its copy to the host."""

    tensor: torch.Tensor
    transfer: HostTransfer
    call: int
    nbytes: int


class HostCopy:
    """A value on the host. `content` is its new memory on the device, once the copy back has begun."""

    __slots__ = ("__weakref__", "content", "lease", "number", "transfer", "transfers")

    def __init__(self, transfers: "Transfers", number: int, transfer: HostTransfer, lease: Lease):
        self.transfers, self.number, self.transfer, self.lease = transfers, number, transfer, lease
        self.content: torch.Tensor | None = None

    def fetch(self) -> torch.Tensor:
        return self.transfers.fetch(self)

    def settle(self) -> None:
        self.transfer.left()

    def __del__(self) -> None:
        if self.content is not None:
            # Fetched ahead and never used. The copy into this memory must end before the allocator reuses it.
            self.transfer.arrived()


class Transfers:
    """Mutable: the values of one device that are on the host or in flight. Several threads may call it.

    `overtaken`: see `HostStore`.
    """

    def __init__(self, *, overtaken: bool = False) -> None:
        self._overtaken = overtaken
        self._leaving: deque[_Departure] = deque()
        self._there: dict[int, weakref.ref[HostCopy]] = {}  # in the order in which they left
        self._lock = threading.RLock()
        self._call = self._sent = 0
        self._leaving_bytes = 0
        self._of_call = 0  # bytes that the running block has sent
        self.window_bytes = 0  # the most bytes that a block has sent: the limit of bytes in flight

    def begin(self) -> None:
        """A call of a block begins."""
        with self._lock:
            self._call += 1
            self._of_call = 0

    def end(self) -> None:
        """A call of a block ends."""
        with self._lock:
            if self._overtaken:
                self._leaving.clear()
                self._leaving_bytes = 0
            # No recorder sees writes after the block. Memory that others hold could change while it is still copied,
            # so the computation waits for those copies now.
            for departure in self._leaving:
                if departure.call == self._call and is_shared(departure.tensor):
                    departure.transfer.left()

    def send(self, tensor: torch.Tensor, transfer: HostTransfer, lease: Lease) -> HostCopy:
        """Register a value whose copy to the host has begun. `tensor` is an alias over its memory that nobody else has.

        Older departures are released until at most `window_bytes` are in flight.
        """
        with self._lock:
            # Hold the memory: freed now, the allocator could give it to a kernel that runs before the copy has read it
            # (such races gave wrong gradients in torchtune#1867, trl#7195 and Megatron#7398).
            nbytes = tensor.untyped_storage().nbytes()
            self._leaving.append(_Departure(tensor, transfer, self._call, nbytes))
            self._leaving_bytes += nbytes
            # The window grows with the largest block seen so far. While that block runs, no copy of its own has to
            # finish. A smaller window would make the computation wait for the link in the middle of it.
            self._of_call += nbytes
            self.window_bytes = max(self.window_bytes, self._of_call)
            # Oldest first: its copy has had the most time, so the computation waits least.
            while self._leaving_bytes > self.window_bytes:
                self._let_go()
            self._sent += 1
            # Weakly: autograd owns the copy. A graph that is dropped without backward must free its buffers (a stash
            # that kept them leaked 5 GB in trl#5700).
            copy = HostCopy(self, self._sent, transfer, lease)
            self._there[copy.number] = weakref.ref(copy, lambda _, number=copy.number: self._gone(number))
            return copy

    def fetch(self, copy: HostCopy) -> torch.Tensor:
        """The value in new memory, for everything computed from here on. Begins the copies back of the next values."""
        with self._lock:
            self._drain()  # backward has begun: the memory of forward's last values is needed now
            content = copy.content if copy.content is not None else copy.transfer.bring()
            copy.content = None
            self._there.pop(copy.number, None)
            self._look_ahead(copy.number)  # before the wait, so that the next copies are queued while this one ends
            copy.transfer.arrived()
            return content

    def _look_ahead(self, number: int) -> None:
        """Begin the copies back of the values sent before this one, the latest first: backward runs in that order."""
        room = self.window_bytes
        for before in reversed(list(self._there)):  # in the order in which they left
            reference = self._there.get(before) if before < number else None
            copy = None if reference is None else reference()  # allocating may free graphs, and with them values here
            if copy is None:
                continue
            room -= copy.lease.nbytes
            if room < 0:
                break
            if copy.content is None:
                copy.content = copy.transfer.bring()

    def _drain(self) -> None:
        while self._leaving:
            self._let_go()

    def _let_go(self) -> None:
        departure = self._leaving.popleft()
        self._leaving_bytes -= departure.nbytes
        # Before the memory is freed at the end of this function: one statement later, and a kernel could reuse it
        # while it is still read (docs/lab-notes.md, "Offload on CUDA, without a card").
        departure.transfer.left()

    def _gone(self, number: int) -> None:
        self._there.pop(number, None)
        if not self._there:  # the graph was dropped without backward, so no `fetch` will release what is in flight
            self._drain()
