"""One training a folder."""

import os
import signal
import threading
from pathlib import Path

import pytest
from real_trainings import begun, endless, written
from tiny_training import Listener, settings

from command_line import tightfit
from quick_trainings import leave_out_pictures
from tightfit.errors import OutputError
from tightfit.models.saving import load_model
from tightfit.training.api import train
from tightfit.training.lock import LOCK, locked


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    leave_out_pictures(monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "metrics.jsonl"}


@pytest.mark.keeps("folder-holds-training-time")
@pytest.mark.slow  # a training in a process of its own; test_signals.py has the refusal
def test_a_second_training_into_a_folder_is_refused_and_after_kill_9_it_is_not(tmp_path: Path):
    first = begun(endless(tmp_path), tmp_path / "run")
    before = contents(tmp_path / "run")
    second = tightfit("train", written(tmp_path), "output.overwrite=true")

    assert (second.code, second.out) == (2, "")
    assert f"{tmp_path / 'run'}: another training is writing here (process {first.pid} on " in second.error
    assert contents(tmp_path / "run") == before
    assert first.poll() is None

    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert (tmp_path / "run" / LOCK).exists()  # a file that nobody locks
    assert "holds an earlier run" in tightfit("train", written(tmp_path)).error
    assert tightfit("train", written(tmp_path), "output.overwrite=true").code == 0
    load_model(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.keeps("folder-holds-training-time")
def test_of_two_trainings_at_once_in_one_process_one_is_refused(tmp_path: Path):
    config = settings(tmp_path, output={"folder": str(tmp_path / "run"), "overwrite": True})
    refusals: list[OutputError] = []

    class StartsAnother(Listener):
        def on_start(self, start):
            another = threading.Thread(target=self.another)
            another.start()
            another.join()

        def another(self):
            try:
                train(config)
            except OutputError as error:
                refusals.append(error)

    result = train(config, reporter=StartsAnother())

    assert result.steps == 4
    assert [f"process {os.getpid()}" in str(error) for error in refusals] == [True]


def test_a_folder_is_one_by_whichever_name(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")

    with locked(tmp_path / "run"), pytest.raises(OutputError, match="another training"), locked(tmp_path / "link"):
        pass


def test_a_lock_whose_file_went_away_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The holder ends, and removes its file, between our opening and our lock."""
    holder = locked(tmp_path)
    holder.__enter__()
    opened = os.open

    def ends_after(*arguments, **options):
        descriptor = opened(*arguments, **options)
        monkeypatch.undo()
        holder.__exit__(None, None, None)
        return descriptor

    monkeypatch.setattr(os, "open", ends_after)
    with locked(tmp_path) as is_locked:
        assert is_locked
        with pytest.raises(OutputError, match="another training"), locked(tmp_path):
            pass


def test_where_a_file_system_has_no_locks_a_training_runs_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unknown(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unknown)
    listener = Listener()
    train(settings(tmp_path), reporter=listener)

    assert any("has no locks" in line for name, line in listener.told if name == "note")


def test_a_training_that_is_refused_leaves_no_lock(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").touch()

    with pytest.raises(OutputError, match="earlier run"):
        train(settings(tmp_path))

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result.json"]
    with locked(tmp_path / "run"):
        pass
