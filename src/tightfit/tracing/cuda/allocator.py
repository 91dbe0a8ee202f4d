"""Simulates PyTorch's caching allocator for CUDA: allocated blocks and reserved segments.

Source: c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_pool`, `get_allocation_size`, `get_free_block`,
`should_split`, `try_merge_blocks`, `release_cached_blocks`, `get_expandable_segment_block`) and
c10/core/AllocatorConfig.h (the constants), torch 2.11 to 2.13, in its default settings.
Each stream has pools of its own: memory that one stream has freed is not given to another.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tightfit.runtime.internals import installed_release

MIB = 2**20
RESULT = 0  # the place of a result among the blocks of `Scratch`
MIN_BLOCK = 512  # kMinBlockSize: sizes are multiples of it
SMALL_SIZE = MIB  # kSmallSize: the largest request that goes to the small pool
SMALL_BUFFER = 2 * MIB  # kSmallBuffer: the segments of the small pool
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: requests from here on get a segment of their own size
LARGE_BUFFER = 20 * MIB  # the segments of requests between the two
ROUND_LARGE = 2 * MIB  # kRoundLarge: what segments of their own size are rounded up to


def round_size(size: int) -> int:
    """The rounded size of a request of `size` bytes."""
    return max(MIN_BLOCK, round_up(size, MIN_BLOCK))


def segment_size(size: int) -> int:
    """The size of the new segment for a (rounded) request that no free block can serve."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE_ALLOC else round_up(size, ROUND_LARGE)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


class Scratch(int):
    """Bytes of scratch memory of an operator call, as the allocator rounds them, with the blocks that it consists of.

    `blocks` are the bytes of each in the order in which the operator allocates them. A negative number frees the last
    block of that size. `RESULT` stands for a result; results without one come before all blocks. A number like any
    other for code that adds bytes: the most that is allocated at a time.
    """

    blocks: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Iterable[int]) -> "Scratch":
        sizes = tuple(round_size(size) if size > 0 else -round_size(-size) if size else RESULT for size in blocks)
        found = cls(max(itertools.accumulate(sizes, initial=0)))
        found.blocks = sizes
        return found


# `registration_counter`: of equal blocks, the one of the oldest segment; before, that of the lowest address. In 2.12
# each block has a number of its own, and splitting makes a new one of the part that is given out.
_RANKED, _ALL_RANKED = (2, 12), (2, 12)


class PoolName(NamedTuple):
    """The stream whose requests a pool serves, and whether it serves small ones."""

    stream: int
    is_small: bool


class DeviceFull(Exception):
    """The device has no room for a segment, even after the allocator returned all free segments."""


@dataclass(eq=False, slots=True)
class SegmentPart:
    """A part of a segment, free or allocated, linked to its neighbours in the segment."""

    address: int
    size: int
    pool: "PoolName"
    rank: int = 0  # among free blocks of one size, the least comes first, before the address
    is_free: bool = True
    before: "SegmentPart | None" = None
    after: "SegmentPart | None" = None


@dataclass
class _Pool:
    """Free blocks, sorted by size, rank and address."""

    keys: list[tuple[int, ...]] = field(default_factory=list)
    blocks: dict[tuple[int, ...], SegmentPart] = field(default_factory=dict)

    def add(self, block: SegmentPart) -> None:
        key = block.size, block.rank, block.address
        bisect.insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: SegmentPart) -> None:
        key = block.size, block.rank, block.address
        del self.keys[bisect.bisect_left(self.keys, key)]
        del self.blocks[key]

    def best_fit(self, size: int) -> SegmentPart | None:
        place = bisect.bisect_left(self.keys, (size,))
        return self.blocks[self.keys[place]] if place < len(self.keys) else None

    def whole_segments(self) -> list[SegmentPart]:
        return [block for block in self.blocks.values() if block.before is None and block.after is None]


class CachingAllocator:
    """Mutable: the segments of one device and the blocks in them.

    `allocated` are the bytes of allocated blocks, whole blocks even if the request was smaller
    (`torch.cuda.memory_allocated`). `reserved` are the bytes of all segments (`memory_reserved`). Each has its peak.
    `capacity` limits the bytes of segments; None: no limit. With `expandable`, each pool is one segment that grows
    (`PYTORCH_ALLOC_CONF=expandable_segments:True`).
    """

    def __init__(self, *, capacity: int | None = None, expandable: bool = False):
        self.capacity = capacity
        self.expandable = expandable
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self._pools: defaultdict[PoolName, _Pool] = defaultdict(_Pool)
        self._ends: dict[PoolName, SegmentPart] = {}  # the last block of each growing segment
        self._release = installed_release()
        self._next_address = self._ranks = 0

    def allocate(self, size: int, stream: int = 0) -> SegmentPart:
        """A block for a request of `size` > 0 bytes by a stream. Raises `DeviceFull`."""
        rounded = round_size(size)
        name = PoolName(stream, rounded <= SMALL_SIZE)
        pool = self._pools[name]
        block = pool.best_fit(rounded)
        if block is None:
            block = self._grow(rounded, name) if self.expandable else self._new_segment(rounded, name)
        else:
            pool.remove(block)
        if self._should_split(block, rounded):
            self._split(block, rounded)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: SegmentPart) -> None:
        """Free a block, and join it with its free neighbours."""
        assert not block.is_free, "a block is freed once"
        self.allocated -= block.size
        block.is_free = True
        pool = self._pools[block.pool]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                pool.remove(neighbour)
                self._join(block, neighbour)
        pool.add(block)

    def free_blocks(self) -> dict[PoolName, list[tuple[int, ...]]]:
        """Size, rank and address of each free block."""
        return {name: list(pool.keys) for name, pool in self._pools.items()}

    def _should_split(self, block: SegmentPart, size: int) -> bool:
        rest = block.size - size
        # A rest of at most 1 MiB remains part of a large block, and counts as allocated (`should_split`).
        return rest >= MIN_BLOCK if block.pool.is_small or self.expandable else rest > SMALL_SIZE

    def _split(self, block: SegmentPart, size: int) -> None:
        rest = SegmentPart(block.address + size, block.size - size, block.pool, block.rank)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        if self._release == _ALL_RANKED:
            block.rank = self._next_rank()
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        self._pools[block.pool].add(rest)

    def _join(self, block: SegmentPart, neighbour: SegmentPart) -> None:
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size
        if self._ends.get(block.pool) is neighbour:
            self._ends[block.pool] = block

    def _new_segment(self, size: int, pool: PoolName) -> SegmentPart:
        asked = segment_size(size)
        self._reserve(asked)
        self._next_address -= asked  # a driver maps later segments below earlier ones
        return SegmentPart(self._next_address, asked, pool, self._next_rank() if self._release >= _RANKED else 0)

    def _next_rank(self) -> int:
        self._ranks += 1
        return self._ranks

    def _grow(self, size: int, pool: PoolName) -> SegmentPart:
        # Pages of the size of a segment are mapped after the last block. If that block is free, it grows.
        if not self._has_room(self._missing(size, pool)):
            self.release_cached()  # which may take that block
        mapped = self._missing(size, pool)
        self._reserve(mapped)
        end = self._ends.get(pool)
        if end is not None and end.is_free:
            self._pools[pool].remove(end)
            end.size += mapped
            return end
        block = SegmentPart(0 if end is None else end.address + end.size, mapped, pool, before=end)
        if end is not None:
            end.after = block
        self._ends[pool] = block
        return block

    def _missing(self, size: int, pool: PoolName) -> int:
        end = self._ends.get(pool)
        usable = end.size if end is not None and end.is_free else 0
        return round_up(size - usable, SMALL_BUFFER if pool.is_small else LARGE_BUFFER)

    def _has_room(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def _reserve(self, size: int) -> None:
        if not self._has_room(size):
            self.release_cached()
            if not self._has_room(size):
                assert self.capacity is not None, "without a capacity there is room"
                raise DeviceFull(f"{size} bytes asked of {self.capacity - self.reserved}")
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def release_cached(self) -> None:
        """Return free segments to the device. Of growing segments, only a free end can be returned."""
        for name, pool in self._pools.items():
            end = self._ends.get(name)
            whole = [end] if end is not None and end.is_free else [] if self.expandable else pool.whole_segments()
            for block in whole:
                pool.remove(block)
                self.reserved -= block.size
                if self.expandable:
                    self._drop_end(name)

    def _drop_end(self, name: PoolName) -> None:
        before = self._ends.pop(name).before
        if before is not None:
            before.after = None
            self._ends[name] = before
