"""Trackers receive the figures of metrics.jsonl; real files of each, and a training that outlives them."""

import contextlib
import json
import os
import socket
import sqlite3
import struct
import sys
import time

import pytest
from tiny_training import Listener, metrics, run, settings

from quick_trainings import leave_out_measuring
from tightfit.errors import ConfigError
from tightfit.training.api import train
from tightfit.training.tracking import trackers as module
from tightfit.training.tracking.base import FOLDER, IDENTITY, demand_packages, tracked_run
from tightfit.training.tracking.trackers import Trackers


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """No connection leaves this machine, no key is there, and nobody can be asked for one."""
    connect = socket.socket.connect

    def local_only(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "TRACKIO_PROJECT", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for input"))


def tracked(folder, *names, notes=None):
    found = Trackers(names, folder, {"training.max_steps": 3}, (notes if notes is not None else []).append)
    found.begin()
    return found


def scalars(folder):
    """All scalars in a folder of event files, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / FOLDER / "tensorboard")).Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_has_every_figure_while_the_training_runs_and_purges_what_runs_again(tmp_path):
    pytest.importorskip("tensorboard")
    first = tracked(tmp_path, "tensorboard")
    for step in (1, 2, 3, 4):
        first.log(step, {"train/loss": 5.0 - step})
    assert scalars(tmp_path) == {"train/loss": [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]}  # not closed: killed here
    second = tracked(tmp_path, "tensorboard")
    second.log(3, {"train/loss": 2.5})
    second.close({})
    assert scalars(tmp_path) == {"train/loss": [(1, 4.0), (2, 3.0), (3, 2.5)]}


@pytest.mark.keeps("trackers-receive-line-metrics")
@pytest.mark.slow  # wandb starts a process of its own
def test_wandb_without_a_key_writes_offline_into_the_runs_folder_and_goes_on_with_its_id(tmp_path, capfd):
    pytest.importorskip("wandb")
    for steps in ((1, 2), (2, 3)):
        tracker = tracked(tmp_path, "wandb")
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.close({"last_loss": 0.5})
        time.sleep(1)  # wandb names its folders by the second
    identity = json.loads((tmp_path / FOLDER / IDENTITY).read_text())["id"]
    written = sorted((tmp_path / FOLDER / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert written
    logged = [record for path in written for record in history(path)]
    assert {(step, loss) for step, loss in logged} >= {(1, 1.0), (2, 0.5), (3, 1 / 3)}
    assert capfd.readouterr().out == ""


def history(path):
    """Step and loss of each record in a .wandb file: records of LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place = path.read_bytes(), 7
    while place + 7 <= len(content):
        size, kind = struct.unpack_from("<HB", content, place + 4)
        assert kind == 1, "a small run has whole records in its first block"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + size])
        if record.HasField("history"):
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            yield items["_step"], items["train/loss"]
        place += 7 + size


@pytest.mark.keeps("trackers-receive-line-metrics")
def test_trackio_has_every_step_once_after_a_resume(tmp_path, monkeypatch, capfd):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setenv("TRACKIO_PROJECT", f"project{os.getpid()}")
    for steps in ((1, 2, 3), (3, 4)):
        tracker = tracked(tmp_path, "trackio")
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.close({})
    database = SQLiteStorage.get_project_db_path(f"project{os.getpid()}")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(text)["train/loss"]) for step, text in rows] == [(n, 1.0 / n) for n in (1, 2, 3, 4)]
    assert capfd.readouterr().out == ""


class Counting:
    """Remembers what it is given; fails where it is told to."""

    def __init__(self, run, fails_at=None):
        self.run, self.fails_at, self.steps, self.closed = run, fails_at, [], None

    def log(self, step, figures):
        if step == self.fails_at:
            raise ConnectionError("the server\nis gone")
        self.steps.append(step)

    def close(self, summary):
        self.closed = summary


def test_one_that_fails_is_noted_once_and_the_others_go_on(tmp_path, monkeypatch):
    made = {}
    monkeypatch.setattr(module, "demand_packages", lambda names: None)
    for name, fails_at in (("tensorboard", None), ("wandb", 2)):
        monkeypatch.setitem(module.KINDS, name, lambda run, n=name, at=fails_at: made.setdefault(n, Counting(run, at)))
    monkeypatch.setitem(module.KINDS, "trackio", lambda run: 1 / 0)
    notes = []
    several = tracked(tmp_path, "wandb", "trackio", "tensorboard", notes=notes)
    for step in (1, 2, 3):
        several.log(step, {"train/loss": 1.0})
    several.close({"steps": 3})
    several.close({})
    assert notes == [
        "output.track: trackio failed (ZeroDivisionError: division by zero): the training goes on without it",
        "output.track: wandb failed (ConnectionError: the server is gone): the training goes on without it",
    ]
    assert made["tensorboard"].steps == [1, 2, 3]
    assert made["tensorboard"].closed == {"steps": 3}
    assert made["wandb"].steps == [1]


def test_a_run_keeps_its_identity_and_one_that_cannot_be_read_is_replaced(tmp_path):
    first, again = tracked_run(tmp_path, {}), tracked_run(tmp_path, {})
    assert (first.is_resumed, again.is_resumed) == (False, True)
    assert first.identity == again.identity
    for content in ("", "[]", '{"id": "../../x"}', '{"id": 3}'):
        (tmp_path / FOLDER / IDENTITY).write_text(content)
        assert not tracked_run(tmp_path, {}).is_resumed


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / FOLDER).write_text("in the way")
    notes = []
    Trackers((), tmp_path, {}, notes.append).begin()
    assert notes == []
    monkey = Trackers.__new__(Trackers)
    monkey.__dict__.update(_names=("wandb",), _folder=tmp_path, _config={}, _note=notes.append, _open={})
    monkey.begin()
    assert "the training goes on without trackers" in notes[0]


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackio needs the package trackio.*pip install 'tightfit\[track\]'"):
        demand_packages(["trackio"])


@pytest.mark.keeps("trackers-receive-line-metrics")
def test_a_training_is_tracked_and_goes_on_in_the_same_run_after_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    leave_out_measuring(monkeypatch)
    keys = {"output": {"track": ["tensorboard"]}, "checkpoint": {"every_steps": 3}}
    run(tmp_path, training={"max_steps": 4, "log_every": 2, "evaluate_every": 2}, **keys)
    identity = (tmp_path / "run" / FOLDER / IDENTITY).read_text()
    result = train(
        settings(tmp_path, training={"max_steps": 6, "log_every": 2, "evaluate_every": 2}, **keys), resume=True
    )
    assert (tmp_path / "run" / FOLDER / IDENTITY).read_text() == identity
    found = scalars(tmp_path / "run")
    lines = metrics(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [line["step"] for line in lines] == [1, 2, 4, 6]
    assert found["train/loss"] == [(line["step"], line["loss"]) for line in lines]
    validated = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    assert found["validation/loss"] == validated
    assert validated[-1] == (6, result.validation_loss)
    assert found["memory/step_peak_bytes"][-1][0] == 6


@pytest.mark.keeps("trackers-receive-line-metrics")
def test_a_tracker_that_fails_in_the_middle_does_not_end_a_training(tmp_path, monkeypatch):
    leave_out_measuring(monkeypatch)
    monkeypatch.setattr(module, "demand_packages", lambda names: None)
    monkeypatch.setitem(module.KINDS, "wandb", lambda run: Counting(run, fails_at=2))
    listener = Listener()
    result = train(settings(tmp_path, output={"track": ["wandb"]}), reporter=listener)
    assert result.steps == 4
    assert [line for kind, line in listener.told if kind == "note" and "wandb failed" in line]


def test_overwriting_a_run_begins_new_tracks_and_leaves_a_folder_of_somebody_else(tmp_path, monkeypatch):
    leave_out_measuring(monkeypatch)
    monkeypatch.setattr(module, "demand_packages", lambda names: None)
    monkeypatch.setitem(module.KINDS, "wandb", Counting)
    ours = tmp_path / "run" / FOLDER
    run(tmp_path, training={"max_steps": 1}, output={"track": ["wandb"]})
    first = (ours / IDENTITY).read_text()
    (ours / "wandb").mkdir()
    run(tmp_path, training={"max_steps": 1}, output={"track": ["wandb"], "overwrite": True})
    assert (ours / IDENTITY).read_text() != first
    assert not (ours / "wandb").exists()
    (ours / IDENTITY).unlink()
    (ours / "notes.txt").write_text("mine")
    run(tmp_path, training={"max_steps": 1}, output={"overwrite": True})
    assert (ours / "notes.txt").exists()


def test_a_package_that_is_missing_ends_the_command_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb needs the package wandb"):
        train(settings(tmp_path, output={"track": ["wandb"]}))
    assert not (tmp_path / "run").exists()
