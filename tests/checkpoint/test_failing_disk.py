"""A disk that fails at any call, once or from then on: one line, and every checkpoint before is intact."""

import errno
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_files import Failing
from safetensors.torch import load_file
from tiny_checkpoints import names_in, newest, save, seed_of

from tightfit.errors import OutputError
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.saving import WEIGHTS_FILE
from tightfit.training.checkpoint import files
from tightfit.training.checkpoint.files import Files
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.stored import open_checkpoint
from tightfit.training.storage import RESULT, RunFolder

Work = Callable[[Path, Files], object]


# A call fails once, or everything from it on; the second of each is for the slow test.
FAILURES = [(errno.ENOSPC, True), (errno.EIO, False)]
MORE = [(errno.ENOSPC, False), (errno.EIO, True)]


def every_failure(base: Path, work: Work, failures: list[tuple[int, bool]]) -> Iterator[tuple[Path, str]]:
    """A copy of a folder after the work on it failed, for each call that can fail, with the line."""
    for code, stays in failures:
        for at in itertools.count():
            failing, folder = Failing(at, code, stays), base.with_name("copy")
            shutil.copytree(base, folder)
            try:
                work(folder, failing)
            except OutputError as error:
                yield folder, str(error)
            else:
                assert not failing.has_failed, f"call {at} failed with {errno.errorcode[code]}, and nobody said so"
            shutil.rmtree(folder)
            if at >= failing.calls:
                break


def intact_seeds(folder: Path) -> set[int]:
    """Every checkpoint there, all of which must be intact."""
    seeds = set()
    for entry in Checkpoints(folder).listed():
        checkpoint = open_checkpoint(entry.path)
        checkpoint.verify()
        seeds.add(seed_of(checkpoint))
    return seeds


@pytest.fixture
def base(scratch: Path) -> Path:
    folder = scratch / "checkpoints"
    save(folder, 10)
    save(folder, 20)
    return folder


def check_line(line: str, folder: Path) -> None:
    assert line.startswith(str(folder)), line
    assert "cannot be written: " in line
    assert line.isprintable(), line
    assert ("make room, or choose" if "ENOSPC" in line else "choose another output.folder") in line


def check_new_step(base: Path, failures: list[tuple[int, bool]]) -> None:
    for folder, line in every_failure(base, lambda folder, files: save(folder, 30, 3, files), failures):
        check_line(line, folder)
        assert intact_seeds(folder) in ({10, 20}, {10, 20, 3})
        save(folder, 30, 4)  # when there is room again
        assert names_in(folder) == ["step-00000010", "step-00000020", "step-00000030"]
        assert newest(folder) == 4


def check_same_step(base: Path, failures: list[tuple[int, bool]]) -> None:
    """Something is left of a killed run too, and it was killed before the new checkpoint was in its place."""
    shutil.copytree(base / "step-00000020", base / ".part-step-00000030-01234567")
    (base / "step-00000020").rename(base / ".old-step-00000020-01234567")
    for folder, line in every_failure(base, lambda folder, files: save(folder, 20, 3, files), failures):
        check_line(line, folder)
        assert intact_seeds(folder) in ({10, 20}, {10, 3}, {10, 20, 3})
        save(folder, 30, 4)
        assert newest(folder) == 4
        assert all(not name.startswith(".") for name in names_in(folder))


def check_pruning(base: Path, failures: list[tuple[int, bool]]) -> None:
    save(base, 30)
    for folder, line in every_failure(base, lambda folder, files: Checkpoints(folder, files).prune(1), failures):
        check_line(line, folder)
        assert newest(folder) == 30


def check_files_of_the_run(base: Path, failures: list[tuple[int, bool]]) -> None:
    RunFolder(base).write(RESULT, "old")

    def work(folder: Path, files: Files) -> None:
        RunFolder(folder, files).write(RESULT, "new")

    for folder, line in every_failure(base, work, failures):
        check_line(line, folder)
        assert (folder / RESULT).read_text() in ("old", "new")


def check_lines_of_the_run(base: Path, failures: list[tuple[int, bool]]) -> None:
    RunFolder(base).append("metrics.jsonl", ["one"])

    def work(folder: Path, files: Files) -> None:
        RunFolder(folder, files).append("metrics.jsonl", ["two", "three"])

    for folder, line in every_failure(base, work, failures):
        check_line(line, folder)
        assert (folder / "metrics.jsonl").read_text() in ("one\n", "one\ntwo\nthree\n")


def check_weights_of_the_run(base: Path, failures: list[tuple[int, bool]]) -> None:
    old, new = (Decoder(DecoderConfig(hidden_size=8, num_layers=1, num_heads=2, vocab_size=11)) for _ in range(2))
    RunFolder(base).write_model(old)

    for folder, line in every_failure(base, lambda folder, files: RunFolder(folder, files).write_model(new), failures):
        check_line(line, folder)
        weight = load_file(folder / WEIGHTS_FILE)["embedding.weight"]
        assert any(torch.equal(weight, model.state_dict()["embedding.weight"]) for model in (old, new))


CHECKS = [
    check_new_step, check_same_step, check_pruning, check_files_of_the_run, check_lines_of_the_run,
    check_weights_of_the_run,
]  # fmt: skip


@pytest.mark.keeps("full-disk-input-output")
@pytest.mark.parametrize("check", CHECKS)
def test_a_call_that_fails_is_one_line_and_what_was_intact_stays_so(base: Path, check: Callable):
    check(base, FAILURES)


@pytest.mark.keeps("full-disk-input-output")
@pytest.mark.slow  # both kinds of error once and for good at every call: ten seconds
@pytest.mark.parametrize("check", CHECKS)
def test_a_disk_that_fails_for_good_or_is_full_once_is_one_line_too(base: Path, check: Callable):
    check(base, MORE)


@pytest.fixture
def only_the_seam(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fails where a file is changed by anything but the seam; the calls that it saw."""
    seen = set()

    def watched(name: str) -> Callable:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                assert sys._getframe(1).f_code.co_filename == files.__file__, f"os.{name}"
                seen.add(name)
            return real(*arguments, **named)

        return call

    for name in ("open", "write", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink",
                 "truncate", "ftruncate", "utime", "chmod", "pwrite", "writev"):  # fmt: skip
        monkeypatch.setattr(os, name, watched(name))
    monkeypatch.setattr("builtins.open", None)
    return seen


@pytest.mark.keeps("full-disk-input-output")
def test_every_change_of_a_file_goes_through_the_seam(base: Path, only_the_seam: set[str]):
    """What is past it, the tests of power cuts and of failures do not see."""
    save(base, 30)
    save(base, 30, 4)
    Checkpoints(base).prune(1)
    RunFolder(base).write(RESULT, "new")
    RunFolder(base).append("metrics.jsonl", ["one"])

    assert only_the_seam == {"open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir"}


def test_a_save_that_is_interrupted_leaves_nothing(base: Path):
    class Interrupted(Files):
        def sync_folder(self, path: Path) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(base, 30, files=Interrupted())

    assert names_in(base) == ["step-00000010", "step-00000020"]
