"""Streams of a device that is not there: copies happen at once, and every access to memory is checked for its order.

Each stream, and the computation, has a vector clock: how much of every stream is known to have run before what it is
given next. An event is such a clock. Two accesses to one piece of memory, one of them a write, must be ordered by it;
memory must not go back to the computation while a copy that it has not waited for uses it.
"""

import weakref
from collections import defaultdict
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tightfit.levers.activity import activity
from tightfit.levers.offload.store import HOST, HostStore
from tightfit.levers.offload.transfers import Lanes
from tightfit.memory.pinned import PinnedStore
from tightfit.runtime.operators import traits_of, written_arguments

COMPUTE, OUT, BACK = "compute", "out", "back"


class Access(NamedTuple):
    stream: str
    time: int
    writes: bool


class RecordingStreams:
    """`ignored`: pairs of a waiting stream and the stream it waits for, whose waits do nothing, to see what they are
    for.
    """

    def __init__(self, ignored=()):
        self.ignored = set(ignored)
        self.clocks = defaultdict(lambda: defaultdict(int))
        self.accesses = defaultdict(list)  # by the address of the storage
        self.violations = []
        self.log = []
        self._names = [OUT, BACK]
        self._host = defaultdict(int)

    # What the product calls

    def new(self):
        return self._names.pop(0)

    def current(self):
        return COMPUTE

    def mark(self, stream):
        return stream, dict(self.clocks[stream])

    def wait(self, stream, event):
        marked, clock = event
        self.log.append(("wait", stream, marked))
        if (stream, marked) not in self.ignored:
            _merge(self.clocks[stream], clock)

    def copy(self, stream, *copies):
        for target, source in copies:
            self.copy_one(stream, target, source)

    def copy_one(self, stream, *tensors):
        target, source = (x.untyped_storage() if isinstance(x, torch.Tensor) else x for x in tensors)
        self.log.append((stream, source.nbytes()))
        self.access(stream, source, writes=False)
        self.access(stream, target, writes=True)
        storage = target if stream == BACK else source
        weakref.finalize(storage, self.freed, storage.data_ptr()).atexit = False
        target.copy_(source)

    def finish(self, event):
        self.log.append(("finish", event[0]))
        _merge(self._host, event[1])

    # Pinning, which is done by the host

    def register(self, address, nbytes):
        self.accesses.pop(address, None)
        return True

    def unregister(self, address):
        for access in self.accesses.pop(address, []):
            if self._host[access.stream] < access.time:
                self.violations.append(f"pages are let go of while {access.stream} uses them")

    # The checks

    def access(self, stream, storage, *, writes):
        clock = self.clocks[stream]
        clock[stream] += 1
        kept = []
        for earlier in self.accesses[storage.data_ptr()]:
            ordered = clock[earlier.stream] >= earlier.time
            if not ordered and (writes or earlier.writes):
                kind = "writes" if writes else "reads"
                self.violations.append(f"{stream} {kind} what {earlier.stream} may still use")
            is_replaced = writes or (earlier.stream == stream and not earlier.writes)
            if not (ordered and is_replaced):
                kept.append(earlier)
        self.accesses[storage.data_ptr()] = [*kept, Access(stream, clock[stream], writes)]

    def freed(self, address):
        for access in self.accesses.pop(address, []):
            if self.clocks[COMPUTE][access.stream] < access.time:
                self.violations.append(f"memory goes back to the computation while {access.stream} uses it")


def _merge(clock, other):
    for stream, time in other.items():
        clock[stream] = max(clock[stream], time)


class Computation(TorchDispatchMode):
    """Enters what operators read and write as accesses of the computing stream."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        traits = traits_of(func)
        if activity.offloading or traits.is_view:
            return results
        written = [t for t in tree_iter(written_arguments(traits, args, kwargs)) if isinstance(t, torch.Tensor)]
        written += [t for t in tree_iter(results) if isinstance(t, torch.Tensor)]
        for storage in _storages((args, kwargs)):
            self.streams.access(COMPUTE, storage, writes=False)
        for storage in _storages(written):
            self.streams.access(COMPUTE, storage, writes=True)
        return results


def _storages(tensors):
    found = [leaf.untyped_storage() for leaf in tree_iter(tensors) if isinstance(leaf, torch.Tensor)]
    return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


class SimulatedStore(HostStore):
    """The offload store of a CUDA device, for CPU tensors that play its tensors."""

    def play(self, streams):
        self.streams = streams
        return self

    def tier_of(self, tensor):
        return HOST

    def store_of(self, tier):
        return PinnedStore(self.settings.budget_bytes, self.streams)

    def lanes_of(self, device):
        if device not in self._lanes:
            self._lanes[device] = Lanes(self.streams)
        return self._lanes[device]

    def transfers(self):
        """The values under way; there is one device."""
        (found,) = self._transfers.values()
        return found
