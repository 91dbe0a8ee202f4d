"""A folder of checkpoints: which are kept, which is found, and two processes at once."""

import fcntl
import math
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import names_in, newest, save, seed_of

from tightfit.errors import CheckpointError, OutputError
from tightfit.training.checkpoint import store
from tightfit.training.checkpoint.store import Checkpoints


def steps(folder: Path) -> list[int]:
    return [entry.step for entry in Checkpoints(folder).listed()]


def scored(folder: Path, scores: dict[int, object]) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step, score in scores.items():
        checkpoints.save(step, {"a": torch.tensor(step)}, {"validation_loss": score})
    return checkpoints


def test_a_folder_that_is_not_there_has_no_checkpoints(scratch: Path):
    checkpoints = Checkpoints(scratch / "none")

    assert checkpoints.newest_intact().checkpoint is None
    assert checkpoints.newest_intact().passed_over == ()
    assert checkpoints.listed() == ()
    assert checkpoints.prune(1) == ()
    assert not (scratch / "none").exists()


def test_a_folder_that_cannot_be_read_is_one_line(scratch: Path):
    (scratch / "file").write_text("")

    with pytest.raises(CheckpointError, match="file: cannot be read: Not a directory"):
        Checkpoints(scratch / "file").newest_intact()
    with pytest.raises(OutputError, match=r"cannot be written: .*choose another output.folder"):
        save(scratch / "file", 10)


def test_the_last_are_kept(scratch: Path):
    for step in (10, 20, 30, 100_000_000, 123_456_789_012):
        save(scratch, step)

    removed = Checkpoints(scratch).prune(2)

    assert [path.name for path in removed] == ["step-00000010", "step-00000020", "step-00000030"]
    assert names_in(scratch) == ["step-100000000", "step-123456789012"]
    assert newest(scratch) == 123_456_789_012


@pytest.mark.keeps("last-best-checkpoints-kept")
def test_the_best_are_kept_beside_the_last(scratch: Path):
    scores = {10: 3.0, 20: 1.0, 30: math.nan, 40: None, 50: 2, 60: True, 70: 2.0, 80: 9.0}
    checkpoints = scored(scratch, scores)

    checkpoints.prune(1, keep_best=2)

    assert steps(scratch) == [20, 70, 80]  # of equal ones the later


def test_the_highest_are_the_best_where_higher_is_better(scratch: Path):
    scored(scratch, {10: 3.0, 20: 1.0, 30: math.inf, 40: 0.5}).prune(1, keep_best=2, lower_is_better=False)

    assert steps(scratch) == [10, 30, 40]


@pytest.mark.keeps("last-best-checkpoints-kept")
def test_the_newest_intact_one_stays_whatever_is_damaged(scratch: Path):
    for step in (10, 20, 30, 40):
        save(scratch, step)
    for step in (30, 40):
        with (scratch / f"step-000000{step}" / "tensors.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")

    Checkpoints(scratch).prune(1)

    assert steps(scratch) == [20, 30, 40]  # newer ones are not judged
    assert newest(scratch) == 20


def test_where_none_is_intact_none_is_removed(scratch: Path):
    for step in (10, 20):
        (save(scratch, step) / "manifest.json").unlink()

    assert Checkpoints(scratch).prune(1) == ()
    assert len(names_in(scratch)) == 2


def test_damaged_ones_do_not_count_among_the_last(scratch: Path):
    for step in (10, 20, 30):
        save(scratch, step)
    (scratch / "step-00000020" / "manifest.json").unlink()

    Checkpoints(scratch).prune(2)

    assert steps(scratch) == [10, 30]


def test_the_list_says_what_is_wrong(scratch: Path):
    for step in (10, 20, 30):
        save(scratch, step)
    (scratch / "step-00000020" / "plan.json").unlink()
    (scratch / "step-00000030" / "tensors.safetensors").write_bytes(b"short")
    (scratch / "step-40").mkdir()
    (scratch / "notes.txt").touch()

    first, second, third = Checkpoints(scratch).listed()

    assert first.checkpoint is not None
    assert (first.checkpoint.nbytes, first.problem) == (
        sum(path.stat().st_size for path in first.path.iterdir() if path.name != "manifest.json"),
        None,
    )
    assert (second.checkpoint, second.problem) == (None, f"{second.path}: plan.json is missing")
    assert third.problem == f"{third.path}: tensors.safetensors is 5 bytes long where 614 were written"


def test_what_a_killed_run_left_goes_at_the_next_save(scratch: Path):
    save(scratch, 10)
    for left in (".part-step-00000020-01234567", ".part-step-00000005-76543210"):
        shutil.copytree(scratch / "step-00000010", scratch / left)
    (scratch / ".part-file").touch()

    save(scratch, 30)

    assert names_in(scratch) == ["step-00000010", "step-00000030"]


def test_one_that_was_being_replaced_is_found_and_gets_its_name_back(scratch: Path):
    save(scratch, 10)
    (save(scratch, 20)).rename(scratch / ".old-step-00000020-01234567")
    assert newest(scratch) == 20

    save(scratch, 30)

    assert names_in(scratch) == ["step-00000010", "step-00000020", "step-00000030"]
    assert newest(scratch) == 30


def test_of_two_with_the_same_step_the_one_in_its_place_is_newer(scratch: Path):
    save(scratch, 20, 1).rename(scratch / ".old-step-00000020-01234567")
    save(scratch / "other", 20, 2).rename(scratch / "step-00000020")
    assert newest(scratch) == 2
    (scratch / "step-00000020" / "manifest.json").unlink()
    assert newest(scratch) == 1


@pytest.mark.keeps("two-processes-save-once")
def test_two_savers_at_once_save_all(scratch: Path):
    errors = []

    def run(first: int) -> None:
        try:
            for number in range(8):
                save(scratch, first + number)
                Checkpoints(scratch).prune(6)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert all(entry.checkpoint for entry in Checkpoints(scratch).listed())
    assert newest(scratch) == 207
    assert not [name for name in names_in(scratch) if name.startswith(".")]


@pytest.mark.keeps("two-processes-save-once")
def test_whoever_reads_while_another_saves_and_prunes_finds_one(scratch: Path):
    save(scratch, 1)
    is_done = threading.Event()

    def run() -> None:
        for step in range(2, 30):
            save(scratch, step)
            Checkpoints(scratch).prune(1)
        is_done.set()

    writer = threading.Thread(target=run)
    writer.start()
    found = []
    while not is_done.is_set():
        found.append(Checkpoints(scratch).newest_intact().checkpoint)
    writer.join()

    assert all(found)
    assert newest(scratch) == 29


def test_a_saver_that_another_holds_up_for_long_is_one_line(scratch: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "WAIT_SECONDS", 0.1)
    save(scratch, 10)
    held = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process has been saving there"):
            save(scratch, 20)
    finally:
        os.close(held)

    save(scratch, 20)
    assert steps(scratch) == [10, 20]


@pytest.mark.keeps("save-fit-disk-refused")
def test_a_disk_without_room_is_not_filled(scratch: Path, monkeypatch: pytest.MonkeyPatch):
    step = save(scratch, 10)
    needed = sum(path.stat().st_size for path in step.iterdir() if path.name != "manifest.json")
    sizes = shutil.disk_usage(scratch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: sizes._replace(free=needed - 1))

    with pytest.raises(OutputError, match=r"B are free, and a checkpoint takes 6\d\d B: make room"):
        save(scratch, 20)

    assert names_in(scratch) == ["step-00000010"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: sizes._replace(free=needed))
    save(scratch, 20)


def test_a_file_system_without_locks_is_saved_to(scratch: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert newest(save(scratch, 10).parent) == 10


@pytest.mark.parametrize("name", ["../plan.json", "a/b", ".hidden", "manifest.json", "tensors.safetensors", "a\nb", ""])
def test_a_further_file_has_a_plain_name(scratch: Path, name: str):
    with pytest.raises(OutputError) as refused:
        Checkpoints(scratch).save(1, {}, {}, {name: b""})

    assert repr(name) in str(refused.value)
    assert names_in(scratch) == []


def test_a_record_that_is_no_json_is_refused_before_anything_is_written(scratch: Path):
    with pytest.raises(OutputError, match=r"step-00000001: cannot be written: record\.x\[1\]: a set is no JSON"):
        Checkpoints(scratch / "checkpoints").save(1, {"a": torch.ones(2)}, {"x": [1, {2}]})

    assert names_in(scratch) == []


def test_a_checkpoint_may_be_of_nothing(scratch: Path):
    Checkpoints(scratch).save(0, {}, {})

    found = Checkpoints(scratch).newest_intact().checkpoint
    assert found is not None
    assert (found.step, dict(found.record), dict(found.specs)) == (0, {}, {})
    with pytest.raises(CheckpointError, match=r"has no file 'plan\.json'"):
        found.read_file("plan.json")
    with pytest.raises(CheckpointError, match="has no tensor 'a'"):
        found.read("a")


def test_what_is_found_was_compared_with_what_was_saved(scratch: Path):
    save(scratch, 10, 3)
    found = Checkpoints(scratch).newest_intact().checkpoint
    assert found is not None
    assert seed_of(found) == 3
