"""A pool of reusable buffers outside of the allocator: exact sizes, a bound, statistics, one owner for every buffer.

Activations have the same few sizes in every step. A buffer that comes back is kept for the next who asks for that
very size: no rounding (PyTorch's pinned memory goes up to the next power of two), and nothing is set up twice (a fresh
pinned buffer or a fresh file costs more than the copy into it). Where the bound is reached, buffers of other sizes that
nobody uses make room first; then the pool says no.
"""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Generic, Protocol, TypeVar


class Store(Protocol):
    """Where buffers come from. `allocate` gives None where there is no room."""

    def allocate(self, nbytes: int) -> Any: ...

    def free(self, buffer: Any, nbytes: int) -> None: ...


StoreType = TypeVar("StoreType", bound=Store)


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool has done so far, in bytes and in leases.

    A hit found a buffer of its size, a miss made one, a refusal found no room. `held_bytes` are set up now, in use or
    not, `leased_bytes` are in use, `high_water_bytes` is the most that was ever set up at once.
    """

    hits: int
    misses: int
    refusals: int
    buffers: int
    held_bytes: int
    leased_bytes: int
    high_water_bytes: int

    def __add__(self, other: "PoolStatistics") -> "PoolStatistics":
        """Those of two pools together; the highest points are taken as if they had been at one time."""
        return PoolStatistics(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Lease:
    """A buffer, for as long as somebody holds this."""

    __slots__ = ("_returned", "buffer", "nbytes")

    def __init__(self, buffer: Any, nbytes: int, returned: deque):
        self.buffer = buffer
        self.nbytes = nbytes
        self._returned = returned

    def __del__(self) -> None:
        # Whoever lets go may stand anywhere, in the pool's own locked code too: only a step that cannot be interrupted.
        self._returned.append((self.nbytes, self.buffer))


class BufferPool(Generic[StoreType]):
    """Mutable: all buffers of one store, in use and free. Any thread may ask and let go.

    A pool with a `name` is among those that `named_pools` tells of, for as long as it lives.
    """

    def __init__(self, store: StoreType, name: str | None = None):
        self.store = store
        self.name = name
        self._free: dict[int, list[Any]] = {}  # by size; the size used longest ago first
        self._returned: deque[tuple[int, Any]] = deque()
        self._lock = threading.Lock()
        self._hits = self._misses = self._refusals = 0
        self._held = self._leased = self._high_water = self._buffers = 0
        if name is not None:
            _NAMED.add(self)

    def lease(self, nbytes: int) -> Lease | None:
        """A buffer of exactly `nbytes`, or None where there is no room for it."""
        with self._lock:
            self._take_back()
            buffer = self._reuse(nbytes)
            if buffer is None:
                buffer = self._make(nbytes)
            if buffer is None:
                self._refusals += 1
                return None
            self._leased += nbytes
            return Lease(buffer, nbytes, self._returned)

    @property
    def statistics(self) -> PoolStatistics:
        with self._lock:
            self._take_back()
            return PoolStatistics(
                self._hits, self._misses, self._refusals, self._buffers, self._held, self._leased, self._high_water
            )

    def _take_back(self) -> None:
        while self._returned:
            nbytes, buffer = self._returned.popleft()
            self._leased -= nbytes
            self._free.setdefault(nbytes, []).append(buffer)

    def _reuse(self, nbytes: int) -> Any:
        free = self._free.pop(nbytes, None)
        if not free:
            return None
        buffer = free.pop()
        self._free[nbytes] = free  # put back at the end: the size used last
        self._hits += 1
        return buffer

    def _make(self, nbytes: int) -> Any:
        buffer = self.store.allocate(nbytes)
        while buffer is None and self._drop_one():
            buffer = self.store.allocate(nbytes)
        if buffer is not None:
            self._misses += 1
            self._buffers += 1
            self._held += nbytes
            self._high_water = max(self._high_water, self._held)
        return buffer

    def _drop_one(self) -> bool:
        """Give up a free buffer of the size used longest ago. False where every buffer is in use."""
        for nbytes in list(self._free):
            free = self._free[nbytes]
            if not free:
                del self._free[nbytes]
                continue
            self.store.free(free.pop(), nbytes)
            self._buffers -= 1
            self._held -= nbytes
            return True
        return False


_NAMED: "weakref.WeakSet[BufferPool[Any]]" = weakref.WeakSet()


def named_pools() -> Mapping[str, PoolStatistics]:
    """What the pools of this process that have a name have done so far, those of one name together."""
    found: dict[str, PoolStatistics] = {}
    for pool in list(_NAMED):
        assert pool.name is not None, "only named pools are entered"
        statistics = pool.statistics
        found[pool.name] = found[pool.name] + statistics if pool.name in found else statistics
    return dict(sorted(found.items()))
