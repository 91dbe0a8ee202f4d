"""Values on their way between a CUDA device and the host: what may be in flight, and who waits for whom.

Each direction has a stream of its own beside the one that computes. Nothing of the device's memory changes hands
between streams: memory that a copy reads is held until the computation has been told to wait for that copy, memory
that a copy writes is allocated by the computation and given back to it after it was told to wait for that copy. So the
bytes in use do not depend on how fast copies are, and a dry run predicts them.

How much is in flight follows from the blocks: on the way out, and ahead of backward on the way in, as many bytes as
the largest block offloads.
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
    """One value's way to the host and back. The way out begins when it is made."""

    def left(self) -> None:
        """What is computed from here on comes after the way out."""
        ...

    def bring(self) -> torch.Tensor:
        """Begin the way back, into memory of its own."""
        ...

    def arrived(self) -> None:
        """What is computed from here on comes after the way back."""
        ...


class Lanes:
    """The two copy streams of a device."""

    def __init__(self, streams: CudaStreams):
        self.streams = streams
        self.out, self.back = streams.new(), streams.new()


class CudaTransfer:
    """A storage's bytes, to a pinned buffer and back."""

    def __init__(self, lanes: Lanes, buffer: PinnedBuffer, tensor: torch.Tensor):
        self._lanes, self._buffer = lanes, buffer
        self._dtype, self._device = tensor.dtype, tensor.device
        streams, lane = lanes.streams, lanes.out
        self._owner = streams.current()  # whose the value's memory is
        streams.wait(lane, streams.mark(self._owner))  # the value is there
        if IN in buffer.uses:
            streams.wait(lane, buffer.uses[IN])  # whoever had the buffer before has read it
        with offload():
            streams.copy(lane, buffer.bytes, storage_bytes_of(tensor))
        self._sent = buffer.uses[OUT] = streams.mark(lane)
        self._landed: Any = None

    def left(self) -> None:
        self._hold_back(self._sent)

    def bring(self) -> torch.Tensor:
        streams, lane = self._lanes.streams, self._lanes.back
        self._owner = streams.current()
        with offload():
            content = fresh_memory(self._buffer.bytes.numel(), self._dtype, self._device)
            streams.wait(lane, streams.mark(self._owner))  # who had this memory before has done with it
            streams.wait(lane, self._sent)
            streams.copy(lane, storage_bytes_of(content), self._buffer.bytes)
        self._landed = self._buffer.uses[IN] = streams.mark(lane)
        return content

    def arrived(self) -> None:
        self._hold_back(self._landed)

    def _hold_back(self, event: Any) -> None:
        """The computation, and the stream whose memory is copied if that is another one, wait for the event."""
        streams = self._lanes.streams
        streams.wait(self._owner, event)
        if streams.current() != self._owner:
            streams.wait(streams.current(), event)


def storage_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class _Departure(NamedTuple):
    """A value whose memory on the device is held until its copy has left."""

    tensor: torch.Tensor
    transfer: HostTransfer
    call: int

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


class HostCopy:
    """A value on the host. `content`: its memory on the device again, where the way back has begun."""

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
            self.transfer.arrived()  # its memory goes back to the computation: not before the copy into it is done


class Transfers:
    """Mutable: the values of one device that are on the host or on their way. Threads may take turns.

    `overtaken`: see `HostStore`.
    """

    def __init__(self, *, overtaken: bool = False) -> None:
        self._overtaken = overtaken
        self._leaving: deque[_Departure] = deque()
        self._there: dict[int, weakref.ref[HostCopy]] = {}  # in the order in which they left
        self._lock = threading.RLock()
        self._call = self._sent = 0
        self._of_call = 0  # bytes that the block that runs has sent
        self.window_bytes = 0  # what the largest block sends

    def begin(self) -> None:
        """A call of a block begins."""
        with self._lock:
            self._call += 1
            self._of_call = 0

    def end(self) -> None:
        """A call of a block ends. From here on nobody sees writes into what it computed: a copy of memory that
        somebody holds is waited for.
        """
        with self._lock:
            if self._overtaken:
                self._leaving.clear()
            for departure in self._leaving:
                if departure.call == self._call and is_shared(departure.tensor):
                    departure.transfer.left()

    def send(self, tensor: torch.Tensor, transfer: HostTransfer, lease: Lease) -> HostCopy:
        """The value is on its way out; `tensor` is nobody else's tensor, over its memory."""
        with self._lock:
            self._leaving.append(_Departure(tensor, transfer, self._call))
            self._of_call += self._leaving[-1].nbytes
            self.window_bytes = max(self.window_bytes, self._of_call)
            while sum(departure.nbytes for departure in self._leaving) > self.window_bytes:
                self._let_go()
            self._sent += 1
            copy = HostCopy(self, self._sent, transfer, lease)
            self._there[copy.number] = weakref.ref(copy, lambda _, number=copy.number: self._gone(number))
            return copy

    def fetch(self, copy: HostCopy) -> torch.Tensor:
        """The value in memory of its own, for what is computed from here on; the next ones are on their way."""
        with self._lock:
            self._drain()
            content = copy.content if copy.content is not None else copy.transfer.bring()
            copy.content = None
            self._there.pop(copy.number, None)
            self._look_ahead(copy.number)
            copy.transfer.arrived()
            return content

    def _look_ahead(self, number: int) -> None:
        """Begin the way back of those that left before this one, the last first."""
        room = self.window_bytes
        for before in sorted((n for n in self._there if n < number), reverse=True):
            reference = self._there.get(before)  # one that nobody wants any more may go at any time
            copy = None if reference is None else reference()
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
        departure.transfer.left()  # before its memory is anybody else's

    def _gone(self, number: int) -> None:
        self._there.pop(number, None)
        if not self._there:  # a graph that nobody will run backward
            self._drain()
