"""Entries of the cache of tokens: whole, checked, shared between runs, and never in the way."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tightfit.training.data import cache as module
from tightfit.training.data.bad_lines import Tally
from tightfit.training.data.cache import MANIFEST, build, cached
from tightfit.training.data.writing import MemoryWriter

KEY = {"source": "a"}


class Items:
    """Fills a writer with drawn items."""

    kind = "conversations"
    dtype = np.dtype(np.uint16)
    has_learnt = True
    tokenizer = {"tokenizer.json": "{ü}\n"}  # noqa: RUF012 - nobody writes to it

    def __init__(self, count=50, seed=0, before_last=lambda: None):
        self.count, self.seed, self.before_last = count, seed, before_last

    def fill(self, writer):
        draw = np.random.RandomState(self.seed)
        for number in range(self.count):
            if number == self.count - 1:
                self.before_last()
            ids = draw.randint(0, 60000, draw.randint(1, 200))
            writer.add(ids, ids % 3 == 0)
        tally = Tally("skip")
        tally.skipped, tally.first = 7, "a.jsonl, line 3: bad"
        return tally


def expected(items=None):
    items = items or Items()
    writer = MemoryWriter(items.kind, items.dtype, has_learnt=True)
    items.fill(writer)
    return writer.store(7)


def same(store, other):
    assert store.fingerprint == other.fingerprint
    assert store.lengths.tolist() == other.lengths.tolist()
    for number in range(len(store)):
        assert (store.tokens(number) == other.tokens(number)).all()
        assert (store.learnt(number) == other.learnt(number)).all()


def silent(line):
    raise AssertionError(line)


def test_an_entry_is_found_again_with_all_that_was_written(tmp_path):
    assert cached(KEY, silent, tmp_path) is None
    built = build(KEY, Items(), silent, tmp_path)
    found = cached(KEY, silent, tmp_path)
    for entry in (built, found):
        same(entry.store, expected())
        assert entry.store.skipped_lines == 7
        assert entry.store.kind == "conversations"
        assert entry.first_skipped == "a.jsonl, line 3: bad"
        assert entry.tokenizer == Items.tokenizer
    assert cached({"source": "b"}, silent, tmp_path) is None


def test_the_tokens_are_mapped_and_not_in_memory(tmp_path):
    build(KEY, Items(), silent, tmp_path)
    base = cached(KEY, silent, tmp_path).store.tokens(3)
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert type(base.base).__name__ == "mmap"
    assert not base.flags.writeable


@pytest.mark.keeps("entry-cache-tokens-damaged")
@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "learnt.bin", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone", "empty"])
def test_damage_is_noticed_and_the_entry_made_again(tmp_path, name, damage):
    build(KEY, Items(), silent, tmp_path)
    (entry,) = tmp_path.iterdir()
    path = entry / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    cut = content[: len(content) // 2]
    {
        "flip": lambda: path.write_bytes(content),
        "cut": lambda: path.write_bytes(cut),
        "longer": lambda: path.write_bytes(path.read_bytes() + b" "),
        "gone": path.unlink,
        "empty": lambda: path.write_bytes(b""),
    }[damage]()
    notes = []
    if damage == "longer" and name == MANIFEST:  # a space at the end of JSON says nothing
        assert cached(KEY, silent, tmp_path) is not None
        return
    assert cached(KEY, notes.append, tmp_path) is None
    assert f"the token cache {entry} is damaged (" in notes[0]
    assert "\n" not in notes[0]
    same(build(KEY, Items(), silent, tmp_path).store, expected())
    assert cached(KEY, silent, tmp_path) is not None


@pytest.mark.keeps("entry-cache-tokens-damaged")
def test_every_flipped_bit_of_a_small_entry_is_noticed(tmp_path):
    build(KEY, Items(count=2), silent, tmp_path)
    (entry,) = tmp_path.iterdir()
    kept = tmp_path.with_name("kept")
    shutil.copytree(entry, kept)
    draw = np.random.RandomState(0)
    for name in sorted(path.name for path in kept.iterdir()):
        content = (kept / name).read_bytes()
        for at in draw.randint(0, len(content), 40):
            shutil.rmtree(entry, ignore_errors=True)
            shutil.copytree(kept, entry)
            flipped = bytearray(content)
            flipped[at] ^= 1 << draw.randint(8)
            (entry / name).write_bytes(flipped)
            found = cached(KEY, lambda line: None, tmp_path)
            if found is not None:  # a blank of the manifest for another
                assert name == MANIFEST
                same(found.store, expected(Items(count=2)))


@pytest.mark.keeps("entry-cache-tokens-damaged")
def test_two_that_build_the_same_entry_at_once_both_get_it_whole(tmp_path):
    together = threading.Barrier(2)
    found = []

    def run():
        found.append(build(KEY, Items(before_last=together.wait), silent, tmp_path))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for entry in found:
        same(entry.store, expected())
    assert len(list(tmp_path.iterdir())) == 1
    same(cached(KEY, silent, tmp_path).store, expected())


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_cache import KEY, Items, build, silent

def wait():
    print("ready", flush=True)
    time.sleep(600)

build(KEY, Items(before_last=wait), silent, Path({folder!r}))
"""


@pytest.mark.keeps("entry-cache-tokens-damaged")
@pytest.mark.slow  # an interpreter of its own
def test_a_killed_builder_leaves_nothing_that_blocks_and_its_files_go(tmp_path):
    script = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        (part,) = tmp_path.iterdir()
        long_ago = time.time() - 3600
        os.utime(part, (long_ago, long_ago))
        same(build({"source": "b"}, Items(), silent, tmp_path).store, expected())
        assert part.is_dir(), "what another run is making is not removed"
        process.send_signal(signal.SIGKILL)
    assert cached(KEY, silent, tmp_path) is None
    os.utime(part, (long_ago, long_ago))
    same(build(KEY, Items(), silent, tmp_path).store, expected())
    assert not part.exists()
    assert cached(KEY, silent, tmp_path) is not None


def test_an_error_in_the_source_leaves_nothing(tmp_path):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(KEY, Items(before_last=fail), silent, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.keeps("entry-cache-tokens-damaged")
def test_a_folder_that_cannot_be_written_is_noted_and_the_tokens_are_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    notes = []
    entry = build(KEY, Items(), notes.append, tmp_path / "file" / "tokens")
    same(entry.store, expected())
    assert entry.store.skipped_lines == 7
    assert notes == [
        f"the token cache {tmp_path}/file/tokens cannot be written (Not a directory): the tokens are kept in memory"
    ]


@pytest.mark.keeps("entry-cache-tokens-damaged")
def test_a_disk_that_is_full_before_the_end_is_noted_and_nothing_is_left_there(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    notes = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # a file beyond it is an error, as on a full disk
    try:
        entry = build(KEY, Items(count=500), notes.append, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    same(entry.store, expected(Items(count=500)))
    assert len(notes) == 1
    assert "cannot be written (File too large)" in notes[0]
    assert not list(tmp_path.iterdir())


def test_without_a_key_nothing_stays_and_the_tokens_are_mapped(tmp_path):
    entry = build(None, Items(), silent, tmp_path)
    assert not list(tmp_path.iterdir())
    same(entry.store, expected())


def test_entries_that_were_not_used_for_long_go_and_the_rest_keeps_within_the_limit(tmp_path, monkeypatch):
    for number in range(4):
        build({"source": number}, Items(), silent, tmp_path)
    paths = [module._path(tmp_path, {"source": number}) for number in range(4)]
    now = time.time()
    for number, path in enumerate(paths):
        days = 100 if number == 0 else 10 - number
        os.utime(path / MANIFEST, (now - days * 86400,) * 2)
    build({"source": 4}, Items(), silent, tmp_path)
    assert [path.is_dir() for path in paths] == [False, True, True, True]
    cached({"source": 1}, silent, tmp_path)  # it is the one that was used last
    size = sum(file.stat().st_size for file in paths[1].iterdir())
    monkeypatch.setattr(module, "MOST_BYTES", int(size * 2.5))
    store = cached({"source": 2}, silent, tmp_path).store
    os.utime(paths[2] / MANIFEST, (now - 9 * 86400,) * 2)
    build({"source": 5}, Items(), silent, tmp_path)
    assert [path.is_dir() for path in paths] == [False, True, False, False]
    same(store, expected())  # whoever has it mapped keeps it
