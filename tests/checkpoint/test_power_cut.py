"""A power cut after each system call: an intact checkpoint is there, and it is the newest that was done."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_files import Recorder
from power_cut import Disk, Tree, rebuild
from tiny_checkpoints import names_in, newest, save

from tightfit.training.checkpoint.files import Files
from tightfit.training.checkpoint.names import step_of
from tightfit.training.checkpoint.store import Checkpoints
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


def cuts(recorder: Recorder, seed: int, more: int = 0, before: Tree | None = None) -> Iterator[tuple[int, str, Tree]]:
    """What is done by then (the highest mark), where the cut is, and the state after it; each once.

    There are `more` random states at each call. `before` is what the disk held before the first call.
    """
    disk, chance, seen = Disk(before), random.Random(seed), set()
    for number in range(len(recorder.calls) + 1):
        if number:
            disk.do(recorder.calls[number - 1])
        done = max([0, *(mark for at, mark in recorder.marks if at <= number)])
        for state in [*disk.after_a_cut(chance), *(disk.some(chance) for _ in range(more))]:
            if (key := (done, repr(state))) not in seen:
                seen.add(key)
                yield done, f"after call {number}, {recorder.calls[number - 1]}: {state}", state


def check_cuts(scratch: Path, recorder: Recorder, seed: int, more: int = 0) -> int:
    count = 0
    for done, where, state in cuts(recorder, seed, more):
        root = scratch / "after"
        rebuild(state, root)
        folder = root / "run" / "checkpoints"
        found = newest(folder)
        assert (found or 0) >= done, f"{found}, not {done}: {where}"
        assert all(entry.checkpoint for entry in Checkpoints(folder).listed()), f"one is half there: {where}"
        if count % 5 == 0:  # the run goes on from there
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


@pytest.mark.keeps("after-power-cut-system")
def test_a_complete_checkpoint_is_there_after_a_cut_at_any_call(scratch: Path, recorder: Recorder):
    life(recorder.root, recorder)

    assert len(recorder.calls) > 120
    assert check_cuts(scratch, recorder, seed=0, more=3) > 200


@pytest.mark.keeps("after-power-cut-system")
@pytest.mark.slow  # 40 random selections of what was not synced at each call: a minute
def test_a_complete_checkpoint_is_there_whatever_selection_of_what_was_not_synced_is(scratch: Path, recorder: Recorder):
    life(recorder.root, recorder)

    assert check_cuts(scratch, recorder, seed=1, more=40) > 500


@pytest.mark.keeps("after-power-cut-system")
@pytest.mark.slow  # a second cut at each call of the save that follows a first: half a minute
def test_a_complete_checkpoint_is_there_after_a_second_cut(scratch: Path, recorder: Recorder):
    life(recorder.root, recorder)
    states = [state for *_, state in cuts(recorder, seed=6)]
    count = 0
    for state in random.Random(6).sample(states, 40):
        rebuild(state, root := scratch / "first")
        folder = Path("run") / "checkpoints"
        least = newest(root / folder) or 0
        second = Recorder(root)
        save(root / folder, 50, 7, second)
        for *_, after in cuts(second, seed=7, more=2, before=state):
            rebuild(after, scratch / "second")
            assert newest(scratch / "second" / folder) in ({least, 7} if least else {None, 7}), state
            shutil.rmtree(scratch / "second")
            count += 1
        assert newest(root / folder) == 7
        shutil.rmtree(root)
    assert count > 500


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


@pytest.mark.keeps("after-power-cut-system")
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


@pytest.mark.keeps("run-other-files-old")
def test_a_file_of_the_run_is_the_old_or_the_new_one_after_a_cut_at_any_call(scratch: Path, recorder: Recorder):
    folder = RunFolder(recorder.root / "run", recorder)
    recorder.make_folders(folder.path)
    texts = {0: None, 1: "first", 2: "second, and longer", 3: ""}
    for number in (1, 2, 3):
        folder.write(RESULT, texts[number] or "")
        recorder.mark(number)

    for done, where, state in cuts(recorder, seed=3, more=4):
        rebuild(state, root := scratch / "after")
        path = root / "run" / RESULT
        text = path.read_text() if path.exists() else None
        assert text in [texts[each] for each in range(done, 4)], f"{text!r} {where}"
        shutil.rmtree(root)


@pytest.mark.keeps("run-other-files-old")
def test_lines_that_were_synced_are_there_after_a_cut(scratch: Path, recorder: Recorder):
    folder = RunFolder(recorder.root / "run", recorder)
    recorder.make_folders(folder.path)
    for number in (1, 2):
        folder.append("metrics.jsonl", [f"line {number}"])
        folder.sync("metrics.jsonl")
        recorder.mark(number)

    for done, where, state in cuts(recorder, seed=4, more=4):
        rebuild(state, root := scratch / "after")
        lines = RunFolder(root / "run").lines("metrics.jsonl")
        assert lines[:done] == [f"line {each}" for each in range(1, done + 1)], where
        shutil.rmtree(root)
