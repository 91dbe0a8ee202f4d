"""CUDA's caching allocator, played: the rules of CUDACachingAllocator.cpp on sequences made by hand and at random."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.tracing.cuda import allocator
from tightfit.tracing.cuda.allocator import MIB, CachingAllocator, DeviceFull, SegmentPart, round_size, segment_size


@pytest.mark.parametrize(("asked", "given_out"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_sizes_are_multiples_of_512_bytes(asked, given_out):
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.allocated == given_out == round_size(asked)


@pytest.mark.keeps("allocated-reserved-bytes-follow")
@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_have_the_size_that_their_pool_gives_them(asked, segment):
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved == segment == segment_size(asked)


def test_small_requests_share_a_segment_of_two_mib():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(MIB // 2)
    assert (allocator.reserved, allocator.allocated) == (2 * MIB, 2 * MIB)
    allocator.allocate(512)
    assert allocator.reserved == 4 * MIB


def test_a_small_request_is_not_served_from_the_large_pool():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(5 * MIB))
    allocator.allocate(512)
    assert allocator.reserved == 22 * MIB


def test_a_rest_of_at_most_one_mib_stays_with_a_large_block_and_counts_as_allocated():
    allocator = CachingAllocator()
    allocator.allocate(13 * MIB)
    assert (allocator.reserved, allocator.allocated) == (14 * MIB, 14 * MIB)
    allocator.allocate(12 * MIB + 512)  # a segment of 14 MiB, whose rest is larger than 1 MiB and is cut off
    assert (allocator.reserved, allocator.allocated) == (28 * MIB, 26 * MIB + 512)


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    small_address = small.address
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(25 * MIB).address == small_address
    assert allocator.reserved == 70 * MIB


@pytest.mark.parametrize(("release", "taken"), [((2, 11), 2), ((2, 12), 1), ((2, 13), 0), ((2, 15), 0)])
def test_which_of_equal_blocks_is_taken_depends_on_the_release(monkeypatch, release, taken):
    monkeypatch.setattr(allocator, "installed_release", lambda: release)
    simulated = CachingAllocator()
    segments = [simulated.allocate(16 * MIB) for _ in range(3)]
    for segment in segments:
        simulated.release(segment)
    used = simulated.allocate(8 * MIB)  # a part of the first: in 2.12 it is newer than all from then on
    first = next(number for number, segment in enumerate(segments) if segment is used)
    simulated.release(used)
    assert simulated.allocate(16 * MIB) is segments[taken]
    assert first == (2 if release == (2, 11) else 0)


def test_free_neighbours_become_one_block():
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(6 * MIB) for _ in range(3))
    for block in (first, third, second):
        allocator.release(block)
    assert allocator.allocate(19 * MIB).size == 20 * MIB
    assert allocator.reserved == 20 * MIB


def test_blocks_of_two_segments_do_not_become_one():
    allocator = CachingAllocator()
    for block in [allocator.allocate(20 * MIB) for _ in range(2)]:
        allocator.release(block)
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 70 * MIB


def test_where_the_device_is_full_free_segments_are_given_back_first():
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.release(allocator.allocate(40 * MIB))
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 50 * MIB
    with pytest.raises(DeviceFull):
        allocator.allocate(20 * MIB)


def test_growing_segments_leave_no_gaps():
    fixed, growing = CachingAllocator(), CachingAllocator(expandable=True)
    for one in (fixed, growing):
        for block in [one.allocate(30 * MIB) for _ in range(3)]:
            one.release(block)
        one.allocate(95 * MIB)
    assert fixed.reserved == 186 * MIB
    assert growing.reserved == 100 * MIB


def overlaps(blocks: list[SegmentPart]) -> bool:
    spans = sorted((b.address, b.address + b.size) for b in blocks)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


requests = st.lists(st.tuples(st.integers(1, 48 * MIB), st.integers(0, 30), st.booleans()), max_size=60)


@pytest.mark.keeps("allocated-reserved-bytes-follow")
@given(requests, st.booleans())
@settings(max_examples=80, deadline=None)
def test_whatever_is_asked_blocks_do_not_overlap_and_reserved_covers_allocated(sequence, expandable):
    allocator = CachingAllocator(expandable=expandable)
    held: dict[bool, list[tuple[SegmentPart, int]]] = {True: [], False: []}
    for size, which, is_release in sequence:
        everything = held[True] + held[False]
        if is_release and everything:
            block, _ = everything[which % len(everything)]
            held[block.pool.is_small] = [(b, s) for b, s in held[block.pool.is_small] if b is not block]
            allocator.release(block)
        else:
            block = allocator.allocate(size)
            held[block.pool.is_small].append((block, size))
        for pool in held.values():
            assert not overlaps([block for block, _ in pool])
        assert all(block.size >= round_size(size) for block, size in held[True] + held[False])
        assert sum(b.size for b, _ in held[True] + held[False]) == allocator.allocated <= allocator.reserved
    for block, _ in held[True] + held[False]:
        allocator.release(block)
    assert allocator.allocated == 0
    free = [b for pool in allocator._pools.values() for b in pool.blocks.values()]
    assert sum(b.size for b in free) == allocator.reserved
    assert all(b.before is None and b.after is None for b in free)


@pytest.mark.keeps("memory-stream-freed-given")
@pytest.mark.parametrize("expandable", [False, True])
def test_a_stream_is_not_given_what_another_stream_has_freed(expandable):
    allocator = CachingAllocator(expandable=expandable)
    allocator.release(allocator.allocate(40 * MIB, stream=1))
    allocator.allocate(40 * MIB, stream=0)
    assert allocator.reserved == 80 * MIB
    allocator.allocate(40 * MIB, stream=1)
    assert allocator.reserved == 80 * MIB


@pytest.mark.keeps("memory-stream-freed-given")
@pytest.mark.parametrize("expandable", [False, True])
def test_a_full_device_takes_back_what_any_stream_has_freed(expandable):
    allocator = CachingAllocator(capacity=80 * MIB, expandable=expandable)
    allocator.allocate(20 * MIB)
    own, other = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB, stream=1)
    allocator.release(own)
    allocator.release(other)
    allocator.allocate(50 * MIB)  # more than its own stream's free block, and no memory beside the three blocks
    assert allocator.reserved <= 80 * MIB
    with pytest.raises(DeviceFull):
        allocator.allocate(40 * MIB, stream=1)
