"""A power cut after each system call: an intact checkpoint is there, and it is the newest that was done."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_files import Recorder
from power_cut import Disk, Tree, rebuild
from tiny_checkpoints import names_in, newest, save

from tightfit.checkpoint.files import Files
from tightfit.checkpoint.names import step_of
from tightfit.checkpoint.store import Checkpoints
from tightfit.training.storage import RESULT, RunFolder


def life(root: Path, recorder: Recorder) -> None:
    """Saves, one of them of a step that is there, one after a killed run's, and prunes; marks what is done when.

    A mark is the seed of the checkpoint that must be found from then on, or a newer one.
    """
    folder = root / "run" / "checkpoints"
    for seed, step in ((1, 10), (2, 20), (3, 20)):
        save(folder, step, seed, recorder)
        recorder.mark(seed)
    Checkpoints(folder, recorder).prune(1)
    left = folder / ".part-step-00000030-00000000"
    recorder.mkdir(left)
    recorder.write_file(left / "tensors.safetensors", b"half")
    save(folder, 30, 4, recorder)
    recorder.mark(4)
    save(folder, 30, 5, recorder)
    recorder.mark(5)
    recorder.rename(folder / "step-00000030", folder / ".old-step-00000030-00000000")  # killed while it was replaced
    save(folder, 40, 6, recorder)
    recorder.mark(6)
    Checkpoints(folder, recorder).prune(1, keep_best=1)


def cuts(recorder: Recorder, seed: int, more: int = 0) -> Iterator[tuple[int, Tree]]:
    """Each different state after a cut, with the number of calls that were done: `more` random ones at each call."""
    disk, chance = Disk(), random.Random(seed)
    for number in range(len(recorder.calls) + 1):
        if number:
            disk.do(recorder.calls[number - 1])
        states = [*disk.after_a_cut(chance), *(disk.some(chance) for _ in range(more))]
        for position, state in enumerate(states):
            if state not in states[:position]:
                yield number, state


def check_cuts(scratch: Path, recorder: Recorder, seed: int, more: int = 0) -> int:
    count = 0
    for number, state in cuts(recorder, seed, more):
        done = max([0, *(mark for at, mark in recorder.marks if at <= number and isinstance(mark, int))])
        root = scratch / "after"
        rebuild(state, root)
        folder = root / "run" / "checkpoints"
        found = newest(folder)
        assert (found or 0) >= done, (
            f"after call {number} of {recorder.calls[number - 1]}: {found}, not {done}: {state}"
        )
        if count % 7 == 0:  # the run goes on from there
            save(folder, 50, 7, Unsynced())
            assert newest(folder) == 7
            assert all(name == name.lstrip(".") and step_of(name) for name in names_in(folder))
        shutil.rmtree(root)
        count += 1
    return count


class Unsynced(Files):
    """For what no power cut follows: the test is quicker."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


@pytest.fixture
def recorder(scratch: Path) -> Recorder:
    root = scratch / "recorded"
    root.mkdir()
    return Recorder(root)


def test_a_complete_checkpoint_is_there_after_a_cut_at_any_call(scratch: Path, recorder: Recorder):
    life(recorder.root, recorder)

    assert len(recorder.calls) > 120
    assert check_cuts(scratch, recorder, seed=0) > 300


@pytest.mark.slow  # 40 random selections of what was not synced at each call: a minute
def test_a_complete_checkpoint_is_there_whatever_selection_of_what_was_not_synced_is(scratch: Path, recorder: Recorder):
    life(recorder.root, recorder)

    assert check_cuts(scratch, recorder, seed=1, more=40) > 3000


class Forgetful(Recorder):
    """Leaves out one sync of a file or a folder, by its number."""

    def __init__(self, root: Path, left_out: int):
        super().__init__(root)
        self.left_out, self.syncs = left_out, 0

    def _is_due(self) -> bool:
        self.syncs += 1
        return self.syncs - 1 != self.left_out

    def sync(self, descriptor: int) -> None:
        if self._is_due():
            super().sync(descriptor)

    def sync_folder(self, path: Path) -> None:
        if self._is_due():
            super().sync_folder(path)


SYNCS = 7  # of the first save: the folder's parent, the run's folder, three files, the folder they are in, its new name


@pytest.mark.parametrize("left_out", range(SYNCS))
def test_each_sync_is_needed(scratch: Path, left_out: int):
    """The test above fails without any of them."""
    root = scratch / "recorded"
    root.mkdir()
    recorder = Forgetful(root, left_out)
    save(root / "run" / "checkpoints", 10, 1, recorder)
    recorder.mark(1)

    assert recorder.syncs == SYNCS
    with pytest.raises(AssertionError, match="after call"):
        check_cuts(scratch, recorder, seed=2)


def test_the_name_of_a_folder_that_a_killed_run_made_is_synced_too(scratch: Path, recorder: Recorder):
    recorder.mkdir(recorder.root / "run")
    recorder.mkdir(recorder.root / "run" / "checkpoints")
    recorder.sync_folder(recorder.root)
    save(recorder.root / "run" / "checkpoints", 10, 1, recorder)
    recorder.mark(1)

    check_cuts(scratch, recorder, seed=5)


def test_a_file_of_the_run_is_the_old_or_the_new_one_after_a_cut_at_any_call(scratch: Path, recorder: Recorder):
    folder = RunFolder(recorder.root / "run", recorder)
    recorder.make_folders(folder.path)
    texts = {0: None, 1: "first", 2: "second, and longer", 3: ""}
    for number in (1, 2, 3):
        folder.write(RESULT, texts[number] or "")
        recorder.mark(number)

    for number, state in cuts(recorder, seed=3, more=4):
        done = max([0, *(mark for at, mark in recorder.marks if at <= number and isinstance(mark, int))])
        rebuild(state, root := scratch / "after")
        path = root / "run" / RESULT
        text = path.read_text() if path.exists() else None
        assert text in [texts[each] for each in range(done, 4)], f"after call {number}: {text!r}"
        shutil.rmtree(root)


def test_lines_that_were_synced_are_there_after_a_cut(scratch: Path, recorder: Recorder):
    folder = RunFolder(recorder.root / "run", recorder)
    recorder.make_folders(folder.path)
    for number in (1, 2):
        folder.append("metrics.jsonl", [f"line {number}"])
        folder.sync("metrics.jsonl")
        recorder.mark(number)

    for number, state in cuts(recorder, seed=4, more=4):
        done = max([0, *(mark for at, mark in recorder.marks if at <= number and isinstance(mark, int))])
        rebuild(state, root := scratch / "after")
        lines = RunFolder(root / "run").lines("metrics.jsonl")
        assert lines[:done] == [f"line {each}" for each in range(1, done + 1)]
        shutil.rmtree(root)
