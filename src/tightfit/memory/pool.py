"""A pool of reusable buffers outside of the allocator: exact sizes, a limit, statistics, one owner for every buffer.

Activations have the same few sizes in every step. The pool keeps a returned buffer for the next request of exactly that
size. Sizes are not rounded (PyTorch rounds pinned memory up to the next power of two: 1.78 times the bytes). Buffers
are reused, because making one costs more than the copy into it (a fresh pinned buffer for each copy ran at 11 GB/s
instead of 53). When the limit is reached, the pool first frees unused buffers of other sizes. Then it refuses.
"""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Generic, Protocol, TypeVar


class Store(Protocol):
    """The source of buffers. `allocate` returns None if there is no room."""

    def allocate(self, nbytes: int) -> Any: ...

    def free(self, buffer: Any, nbytes: int) -> None: ...


StoreType = TypeVar("StoreType", bound=Store)


@dataclass(frozen=True)
class PoolStatistics:
    """The statistics of a pool, in bytes and in leases.

    A hit reused a buffer, a miss made one, a refusal found no room. `held_bytes` are all buffers, in use or not.
    `leased_bytes` are buffers in use. `high_water_bytes` is the maximum of `held_bytes` so far.
    """

    hits: int
    misses: int
    refusals: int
    buffers: int
    held_bytes: int
    leased_bytes: int
    high_water_bytes: int

    def __add__(self, other: "PoolStatistics") -> "PoolStatistics":
        """The sum over two pools. Adding their maxima assumes that both occurred at the same time."""
        return PoolStatistics(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Lease:
    """A leased buffer. It returns to its pool when this object is freed."""

    __slots__ = ("_returned", "buffer", "nbytes")

    def __init__(self, buffer: Any, nbytes: int, returned: deque):
        self.buffer = buffer
        self.nbytes = nbytes
        self._returned = returned

    def __del__(self) -> None:
        # This may run anywhere, even inside the pool's own locked code. So it takes no lock: `append` is atomic.
        self._returned.append((self.nbytes, self.buffer))


class BufferPool(Generic[StoreType]):
    """Mutable: all buffers of one store, in use and free. Any thread may lease and return buffers.

    `named_pools` reports a pool with a `name` as long as it exists.
    """

    def __init__(self, store: StoreType, name: str | None = None):
        self.store = store
        self.name = name
        self._free: dict[int, list[Any]] = {}  # by size, the least recently used size first
        self._returned: deque[tuple[int, Any]] = deque()
        self._lock = threading.Lock()
        self._hits = self._misses = self._refusals = 0
        self._held = self._leased = self._high_water = self._buffers = 0
        if name is not None:
            _NAMED.add(self)

    def lease(self, nbytes: int) -> Lease | None:
        """A buffer of exactly `nbytes` bytes; None if there is no room."""
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
        self._free[nbytes] = free  # inserted again at the end, as the most recently used size
        self._hits += 1
        return buffer

    def _make(self, nbytes: int) -> Any:
        buffer = self.store.allocate(nbytes)
        # Sizes of an earlier batch shape may fill the store with buffers that are never used again.
        while buffer is None and self._drop_one():
            buffer = self.store.allocate(nbytes)
        if buffer is not None:
            self._misses += 1
            self._buffers += 1
            self._held += nbytes
            self._high_water = max(self._high_water, self._held)
        return buffer

    def _drop_one(self) -> bool:
        """Free an unused buffer of the least recently used size. False if every buffer is in use."""
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
    """The statistics of this process's named pools. Pools of one name are added."""
    found: dict[str, PoolStatistics] = {}
    for pool in list(_NAMED):
        assert pool.name is not None, "only named pools are entered"
        statistics = pool.statistics
        found[pool.name] = found[pool.name] + statistics if pool.name in found else statistics
    return dict(sorted(found.items()))
