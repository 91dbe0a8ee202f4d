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

from tightfit.levers.activity import offload
from tightfit.levers.recompute.values import modified_in_place
from tightfit.memory.pinned import PinnedBuffer
from tightfit.memory.pool import Lease
from tightfit.runtime.internals import is_shared
from tightfit.runtime.operators import fresh_memory
from tightfit.runtime.streams import CudaStreams

OUT, IN = "out", "in"
GROUP = 8  # copies that begin together, at most


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
    """The two copy streams of a device.

    Copies to the host begin together, a group at a time: then they need one pair of events, and one change of streams.
    """

    def __init__(self, streams: CudaStreams):
        self.streams = streams
        self.out, self.back = streams.new(), streams.new()
        self.lock = threading.RLock()
        self.group: TransferGroup | None = None  # its copies have not begun

    def send(self, buffer: PinnedBuffer, storage: Any) -> "TransferGroup":
        """Copy a storage to a buffer, with others. The group says when that has begun."""
        with self.lock:
            owner = self.streams.current()
            group = self.group
            if group is not None and group.owner != owner:
                group.begin()
                group = None
            if group is None:
                group = self.group = TransferGroup(self, owner)
            group.copies.append((buffer, storage))
            if len(group.copies) >= GROUP:
                group.begin()
            return group

    def begin(self) -> None:
        """Begin the copies that wait for more of them."""
        with self.lock:
            if self.group is not None:
                self.group.begin()


class TransferGroup:
    """Copies to the host that begin together. `owner` is the stream to which the memory of the values belongs."""

    __slots__ = ("copies", "event", "lanes", "owner")

    def __init__(self, lanes: Lanes, owner: Any):
        self.lanes, self.owner = lanes, owner
        self.copies: list[tuple[PinnedBuffer, Any]] = []
        self.event: Any = None  # after the copies; None if they have not begun

    def begin(self) -> Any:
        """Begin the copies, if they have not begun. Returns the event after them."""
        with self.lanes.lock:
            if self.event is not None:
                return self.event
            self.lanes.group = None
            streams, lane = self.lanes.streams, self.lanes.out
            streams.wait(lane, streams.mark(self.owner))  # the values must be computed before they are copied
            for buffer, _ in self.copies:
                if IN in buffer.uses:
                    streams.wait(lane, buffer.uses[IN])  # the pool reuses buffers: the last value must have been read
            with offload():
                streams.copy(lane, *((buffer.storage, storage) for buffer, storage in self.copies))
            self.event = streams.mark(lane)
            for buffer, _ in self.copies:
                buffer.uses[OUT] = self.event
            self.copies = []
            return self.event


class CudaTransfer:
    """Copies a storage's bytes to a pinned buffer and back."""

    __slots__ = ("_buffer", "_device", "_dtype", "_group", "_landed", "_lanes", "_nbytes", "_owner")

    def __init__(self, lanes: Lanes, buffer: PinnedBuffer, tensor: torch.Tensor):
        self._lanes, self._buffer = lanes, buffer
        self._dtype, self._device = tensor.dtype, tensor.device
        storage = tensor.untyped_storage()
        self._nbytes = storage.nbytes()
        self._group = lanes.send(buffer, storage)
        self._owner = self._group.owner  # the stream to which the value's memory belongs
        self._landed: Any = None

    def left(self) -> None:
        self._hold_back(self._group.event or self._group.begin())

    def bring(self) -> torch.Tensor:
        streams, lane = self._lanes.streams, self._lanes.back
        sent = self._group.event or self._group.begin()
        self._owner = streams.current()
        with offload():
            content = fresh_memory(self._nbytes, self._dtype, self._device)
            # The allocator may have given out memory that kernels queued on the computing stream still use.
            streams.wait(lane, streams.mark(self._owner))
            streams.wait(lane, sent)  # the buffer must be filled before it is read
            streams.copy(lane, (content.untyped_storage(), self._buffer.storage))
        self._landed = self._buffer.uses[IN] = streams.mark(lane)
        return content

    def arrived(self) -> None:
        self._hold_back(self._landed)

    def _hold_back(self, event: Any) -> None:
        """Make the current stream wait for the event, and the stream that owns the copied memory, if it is another."""
        streams = self._lanes.streams
        streams.wait(self._owner, event)
        current = streams.current()
        if current != self._owner:
            streams.wait(current, event)


class _Departure(NamedTuple):
    """A value whose memory on the device is held until the computation waits for its copy to the host."""

    tensor: torch.Tensor
    copy: "weakref.ref[HostCopy]"
    transfer: HostTransfer
    call: int
    nbytes: int
    version: int

    def check(self) -> None:
        """Note a write into the memory that came before the copy was complete."""
        copy = self.copy()
        if copy is not None and not copy.is_settled and self.tensor._version != self.version:
            copy.overwritten = modified_in_place(self.tensor, self.version)


class _There:
    """A value on the host that nobody has fetched. The look ahead meets all of these at each fetch."""

    __slots__ = ("copy", "is_coming", "nbytes")

    def __init__(self, copy: "weakref.ref[HostCopy]", nbytes: int):
        self.copy = copy
        self.nbytes = nbytes
        self.is_coming = False  # its copy back has begun


class HostCopy:
    """A value on the host. `content` is its new memory on the device, once the copy back has begun."""

    __slots__ = ("__weakref__", "content", "is_settled", "lease", "number", "overwritten", "transfer", "transfers")

    def __init__(self, transfers: "Transfers", number: int, transfer: HostTransfer, lease: Lease):
        self.transfers, self.number, self.transfer, self.lease = transfers, number, transfer, lease
        self.content: torch.Tensor | None = None
        self.is_settled = False  # a write into the memory waits for the copy
        self.overwritten: RuntimeError | None = None  # a write did not wait

    def fetch(self) -> torch.Tensor:
        return self.transfers.fetch(self)

    def settle(self) -> None:
        self.is_settled = True
        self.transfer.left()

    def __del__(self) -> None:
        if self.content is not None:
            # Fetched ahead and never used. The copy into this memory must end before the allocator reuses it.
            self.transfer.arrived()
        self.transfers.forget(self.number)


class Transfers:
    """Mutable: the values of one device that are on the host or in flight. Several threads may call it.

    `overtaken`: see `HostStore`.
    """

    def __init__(self, *, overtaken: bool = False) -> None:
        self._overtaken = overtaken
        self._leaving: deque[_Departure] = deque()
        self._there: dict[int, _There] = {}  # in the order in which they left
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
                if departure.call != self._call:
                    continue
                departure.check()
                copy = departure.copy()
                if copy is not None:
                    copy.is_settled = True
                if is_shared(departure.tensor):
                    departure.transfer.left()

    def send(self, tensor: torch.Tensor, transfer: HostTransfer, lease: Lease) -> HostCopy:
        """Register a value whose copy to the host has begun. `tensor` is an alias over its memory that nobody else has.

        Older departures are released until at most `window_bytes` are in flight.
        """
        with self._lock:
            # Hold the memory: freed now, the allocator could give it to a kernel that runs before the copy has read it
            # (such races gave wrong gradients in torchtune#1867, trl#7195 and Megatron#7398).
            nbytes = tensor.untyped_storage().nbytes()
            self._sent += 1
            copy = HostCopy(self, self._sent, transfer, lease)
            # Weakly: autograd owns the copy. A graph that is dropped without backward must free its buffers (a stash
            # that kept them leaked 5 GB in trl#5700).
            reference = weakref.ref(copy)
            self._there[copy.number] = _There(reference, nbytes)
            self._leaving.append(_Departure(tensor, reference, transfer, self._call, nbytes, tensor._version))
            self._leaving_bytes += nbytes
            # The window grows with the largest block seen so far. While that block runs, no copy of its own has to
            # finish. A smaller window would make the computation wait for the link in the middle of it.
            self._of_call += nbytes
            self.window_bytes = max(self.window_bytes, self._of_call)
            # Oldest first: its copy has had the most time, so the computation waits least.
            while self._leaving_bytes > self.window_bytes:
                self._let_go()
            return copy

    def fetch(self, copy: HostCopy) -> torch.Tensor:
        """The value in new memory, for everything computed from here on. Begins the copies back of the next values."""
        with self._lock:
            self._drain()  # backward has begun: the memory of forward's last values is needed now
            if copy.overwritten is not None:
                raise copy.overwritten
            content = copy.content if copy.content is not None else copy.transfer.bring()
            copy.content = None
            self._there.pop(copy.number, None)
            self._look_ahead(copy.number)  # before the wait, so that the next copies are queued while this one ends
            copy.transfer.arrived()
            self._begin_again()
            return content

    def _begin_again(self) -> None:
        """Let the next step's window grow as this one's did: memory is then freed in the same order in every step."""
        if not self._there and not self._leaving:
            self.window_bytes = self._of_call = 0

    def _look_ahead(self, number: int) -> None:
        """Begin the copies back of the values sent before this one, the latest first: backward runs in that order."""
        room = self.window_bytes
        for before in reversed(list(self._there)):
            there = self._there.get(before) if before < number else None  # allocating may free graphs and their values
            if there is None:
                continue
            room -= there.nbytes
            if room < 0:
                break
            if there.is_coming:
                continue
            copy = there.copy()
            if copy is not None:
                copy.content = copy.transfer.bring()
                there.is_coming = True

    def _drain(self) -> None:
        while self._leaving:
            self._let_go()

    def _let_go(self) -> None:
        departure = self._leaving.popleft()
        self._leaving_bytes -= departure.nbytes
        # Before the memory is freed at the end of this function: one statement later, and a kernel could reuse it
        # while it is still read (notes/null-card.md, "Offload on CUDA, without a card").
        departure.transfer.left()
        departure.check()

    def forget(self, number: int) -> None:
        """A copy is gone."""
        there = self._there.pop(number, None)
        if there is not None and not self._there:
            self._drain()  # the graph was dropped without backward, so no `fetch` will release what is in flight
            self._begin_again()
