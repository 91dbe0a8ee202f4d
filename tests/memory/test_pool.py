"""A pool hands out buffers of exact size, uses them again, and stays within its bound."""

import ctypes
import errno
import gc
import mmap
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

from tightfit.errors import LeverError, OutputError
from tightfit.memory import disk
from tightfit.memory.disk import ByteRange, DiskStore
from tightfit.memory.pool import BufferPool, named_pools


@pytest.fixture
def store(tmp_path):
    return DiskStore(tmp_path, budget_bytes=1000)


@pytest.fixture
def pool(store):
    return BufferPool(store)


def test_a_buffer_that_came_back_serves_the_next_of_its_size(pool):
    first = pool.lease(300)
    extent = first.buffer
    del first
    second = pool.lease(300)
    assert second.buffer == extent
    assert (pool.statistics.hits, pool.statistics.misses, pool.statistics.held_bytes) == (1, 1, 300)


def test_a_buffer_in_use_is_nobody_elses(pool):
    leases = [pool.lease(100) for _ in range(10)]
    ends = sorted((lease.buffer.start, lease.buffer.end) for lease in leases)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert pool.statistics.leased_bytes == 1000


def test_the_pool_says_no_where_everything_is_in_use(pool):
    leases = [pool.lease(400), pool.lease(400), pool.lease(400)]
    assert leases[2] is None
    assert pool.statistics.refusals == 1
    assert pool.statistics.held_bytes == 800


def test_free_buffers_of_other_sizes_make_room(pool):
    del_me = [pool.lease(400), pool.lease(500)]
    del_me.clear()
    assert pool.lease(900).buffer == ByteRange(0, 900)
    statistics = pool.statistics
    assert (statistics.buffers, statistics.high_water_bytes, statistics.refusals) == (1, 900, 0)


@pytest.mark.keeps("activations-offloaded-hand-out")
def test_the_file_is_never_longer_than_the_budget_whatever_the_order(pool, store):
    held = {}
    for turn in range(400):
        size = 10 + (turn * 37) % 290
        held.pop(turn % 7, None)
        held[turn % 7] = pool.lease(size)
        assert os.fstat(store._fd).st_size <= 1000
    leases = [lease for lease in held.values() if lease is not None]
    spans = sorted(lease.buffer for lease in leases)
    assert all(a.end <= b.start for a, b in pairwise(spans))
    assert pool.statistics.leased_bytes == sum(lease.nbytes for lease in leases)


def test_space_at_the_end_goes_back_to_the_disk(store):
    first, second = store.allocate(200), store.allocate(300)
    store.free(first, 200)
    assert os.fstat(store._fd).st_size == 500
    store.free(second, 300)
    assert os.fstat(store._fd).st_size == 0


def test_the_file_has_no_name(store, tmp_path):
    store.allocate(500)
    assert not list(tmp_path.iterdir())


def test_files_go_to_a_disk_where_the_folder_for_temporary_files_is_memory(tmp_path, monkeypatch):
    """Unless somebody named that folder."""
    mounts, memory, lasting = tmp_path / "mounts", tmp_path / "memory", os.stat("/var/tmp").st_dev
    memory.mkdir()
    device = os.stat(memory).st_dev
    line = "36 35 {}:{} / /somewhere rw,noatime shared:1 - {} none rw\n"
    monkeypatch.setattr(disk, "MOUNTS", mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(memory))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    mounts.write_text(line.format(os.major(device), os.minor(device), "ext4"))
    assert disk.temporary_folder() == memory
    mounts.write_text(line.format(os.major(device), os.minor(device), "tmpfs"))
    assert disk.is_in_memory(memory)
    assert disk.temporary_folder() == (memory if lasting == device else Path("/var/tmp"))
    monkeypatch.setattr(disk, "is_in_memory", lambda folder: folder == memory)
    assert disk.temporary_folder() == Path("/var/tmp")
    monkeypatch.setenv("TMPDIR", str(memory))
    assert disk.temporary_folder() == memory
    mounts.unlink()
    monkeypatch.undo()
    assert not disk.is_in_memory(tmp_path / "nowhere")


@pytest.mark.parametrize("has_way", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000])
def test_bytes_past_the_file_cache_are_the_ones_that_were_written(nbytes, has_way, tmp_path, monkeypatch):
    """Also where the file system has no such way, and of bytes that begin within a page."""
    store = DiskStore(tmp_path)
    if not has_way:
        monkeypatch.setattr("os.O_DIRECT", 1 << 30, raising=False)
        real = os.open
        monkeypatch.setattr(
            "os.open", lambda path, flags, *rest: refused() if flags & 1 << 30 else real(path, flags, *rest)
        )

    def refused():
        raise OSError(errno.EINVAL, "no such way")

    store.allocate(8192)
    extent = store.allocate(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    source = os.urandom(nbytes)
    kept = ctypes.create_string_buffer(source, nbytes)
    store.write(ByteRange(extent.start, nbytes), ctypes.addressof(kept))
    pages = mmap.mmap(-1, extent.nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    store.read_past_cache(ByteRange(extent.start, nbytes), address)
    assert pages[:nbytes] == source
    if nbytes > 10:
        store.read_past_cache(ByteRange(extent.start + 3, nbytes - 3), address)
        assert pages[: nbytes - 3] == source[3:]


def test_a_disk_that_fills_up_is_a_no_and_other_trouble_is_raised(pool, monkeypatch):
    def full(fd, start, nbytes):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    code = errno.ENOSPC
    assert pool.lease(10) is None
    code = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        pool.lease(10)


def test_what_cannot_be_used_is_refused_in_one_line(tmp_path):
    with pytest.raises(OutputError, match=r"^offload: .*/none cannot be used: No such file or directory: name another"):
        DiskStore(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"^offload: no file can be made in .*/file: Not a directory: name another"):
        DiskStore(tmp_path / "file")
    with pytest.raises(LeverError, match=r"^offload: .* TiB are more than the .* GiB that are free in .*: lower"):
        DiskStore(tmp_path, budget_bytes=2**60)


def test_pools_of_one_name_are_told_of_together_and_only_while_they_live(tmp_path):
    pools = [BufferPool(DiskStore(tmp_path, budget_bytes=1000), "of this test") for _ in range(2)]
    BufferPool(DiskStore(tmp_path, budget_bytes=1000)).lease(100)
    leases = [pools[0].lease(300), pools[1].lease(200)]
    told = named_pools()["of this test"]
    assert (told.leased_bytes, told.misses, told.buffers) == (500, 2, 2)
    del pools[1]
    assert named_pools()["of this test"].high_water_bytes == 300
    del leases, pools[0]
    gc.collect()
    assert "of this test" not in named_pools()


def test_a_drive_is_measured_once_and_past_the_file_cache(tmp_path, monkeypatch):
    forgotten = []
    forget = DiskStore.forget
    monkeypatch.setattr(disk, "_drives", {})
    monkeypatch.setattr(DiskStore, "forget", lambda store, extent: (forgotten.append(extent), forget(store, extent)))
    assert disk.drive_rate(tmp_path) == disk.drive_rate(tmp_path) > 0
    assert [extent.nbytes for extent in forgotten] == [disk.PROBE_BYTES]
    monkeypatch.setattr(disk, "_drives", {})
    monkeypatch.setattr(DiskStore, "allocate", lambda store, nbytes: None)
    with pytest.raises(LeverError, match=r"stream: .* has no room: name a folder on another disk"):
        disk.drive_rate(tmp_path)
