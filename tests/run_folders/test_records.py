"""Folders of runs in every state, whole, half written, damaged and somebody else's."""

import json
import os
import subprocess
import sys

import pytest

from tightfit.errors import InputError
from tightfit.names import CHECKPOINTS, CONFIG, LOCK, METRICS, PLAN, RESULT
from tightfit.training.lock import locked
from tightfit.training.run_folders import records
from tightfit.training.run_folders.records import RunState, config_of, curve_of, differences, is_run, run_at, runs_in


def line(step, **figures):
    return json.dumps({"step": step, "loss": 5.0 / step, "tokens_per_second": 10.0 * step, **figures}) + "\n"


def made(folder, *, ended=True, interrupted=False, steps=3, **files):
    """A run's folder as a training leaves it; `files` by the constants' names in small letters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text("training: {max_steps: 8, learning_rate: 0.01}\ndata: {seed: 1}\n")
    (folder / PLAN).write_text(json.dumps({"peak_bytes": 90, "budget_bytes": 100}))
    (folder / METRICS).write_text("".join(line(step) for step in range(1, steps + 1)))
    outcome = {"steps": steps, "last_loss": 1.5, "validation_loss": 1.75, "interrupted": interrupted,
               "predicted_peak_bytes": 90, "measured_peak_bytes": 89, "budget_bytes": 100,
               "tokens_per_second": 42.0}  # fmt: skip
    if ended:
        (folder / RESULT).write_text(json.dumps(outcome))
    for name, content in files.items():
        (folder / {"metrics": METRICS, "result": RESULT, "config": CONFIG, "plan": PLAN}[name]).write_bytes(content)
    return folder


def test_a_finished_run_is_what_its_result_says(tmp_path):
    found = run_at(made(tmp_path / "a"))
    assert (found.state, found.steps, found.max_steps) == (RunState.FINISHED, 3, 8)
    assert (found.loss, found.validation_loss, found.tokens_per_second) == (1.5, 1.75, 42.0)
    assert (found.predicted_peak_bytes, found.measured_peak_bytes, found.budget_bytes) == (90, 89, 100)
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert found.problems == ()


def test_an_interrupted_run_and_a_killed_one_are_told_apart(tmp_path):
    made(tmp_path / "cut", interrupted=True)
    made(tmp_path / "killed", ended=False, steps=5)
    (tmp_path / "killed" / LOCK).write_text("process 4194304 on " + os.uname().nodename)
    cut, killed = runs_in(tmp_path)
    assert cut.state == RunState.INTERRUPTED
    assert (killed.state, killed.steps, killed.loss, killed.measured_peak_bytes) == (RunState.KILLED, 5, 1.0, None)
    assert (killed.predicted_peak_bytes, killed.budget_bytes) == (90, 100)


def test_a_run_whose_folder_is_locked_is_running_whatever_an_earlier_part_has_left(tmp_path):
    folder = made(tmp_path / "run", interrupted=True, metrics=(line(1) + line(7)).encode() + b'{"step": 8, "lo')
    with locked(folder):
        found = run_at(folder)
    assert (found.state, found.steps, found.loss) == (RunState.RUNNING, 7, 5.0 / 7)
    assert found.holder == f"process {os.getpid()} on {os.uname().nodename}"
    assert run_at(folder).state == RunState.INTERRUPTED


@pytest.mark.keeps("run-folder-state-listed")
def test_listing_takes_no_lock_that_a_training_could_meet(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: pytest.fail("locked"))
    (tmp_path / LOCK).write_text(f"process 4194304 on {os.uname().nodename}")
    assert records.holder(tmp_path) is None


def test_where_the_system_lists_no_locks_the_lock_itself_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LOCKS", tmp_path / "none")
    with locked(tmp_path):
        assert records.holder(tmp_path) is not None
    (tmp_path / LOCK).write_text("process 1 on elsewhere")
    assert records.holder(tmp_path) is None


def test_runs_are_found_at_several_depths_and_nothing_else_is_one(tmp_path):
    for name in ("b", "deep/er/c", "a"):
        made(tmp_path / name)
    made(tmp_path / "b" / "inside")  # of a run's own folder nothing is listed
    made(tmp_path / ".hidden" / "x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / CONFIG).write_text("a: 1")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [run.name for run in runs_in(tmp_path)] == ["a", "b", "deep/er/c"]
    assert [run.name for run in runs_in(tmp_path / "a")] == [str(tmp_path / "a")]


def test_a_folder_that_is_not_there_or_holds_no_run_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        runs_in(tmp_path / "none")
    with pytest.raises(InputError, match="holds no run"):
        run_at(tmp_path)
    assert runs_in(tmp_path) == []


DAMAGED = {
    "a result that is cut": ({"result": b'{"steps": 3, "la'}, "result.json: not valid JSON"),
    "a result of another program": ({"result": b'{"accuracy": 1}'}, "result.json: does not say how many steps"),
    "a result that is a list": ({"result": b"[1]"}, "result.json: holds no object"),
    "figures of other types": ({"result": b'{"steps": "3", "last_loss": [], "budget_bytes": -1}'}, "does not say how"),
    "a deep result": ({"result": b"[" * 100_000}, "result.json: not valid JSON"),
    "a plan that is no text": ({"plan": b"\xff\xfe\x00"}, "plan.json: not valid JSON"),
    "a config that is no mapping": ({"config": b"- 1"}, "config.yaml: holds no mapping"),
    "a config that is no YAML": ({"config": b"a: [1\n b: }"}, "config.yaml: not valid YAML"),
    "a config of bytes": ({"config": b"\xff"}, "config.yaml: not valid YAML"),
    "metrics of another program": ({"metrics": b"epoch,loss\n1,2\n"}, "metrics.jsonl: its last whole line is no step"),
}


@pytest.mark.keeps("run-folder-state-listed")
@pytest.mark.parametrize(("files", "problem"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_line_and_the_rest_is_read(tmp_path, files, problem):
    (found,) = runs_in(made(tmp_path / "run", **files).parent)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(problem) or problem in found.problems[0]
    assert "\n" not in found.problems[0]
    curve_of(found)
    config_of(found)


def test_folders_in_the_place_of_files_and_files_that_may_not_be_read_are_lines(tmp_path):
    folder = made(tmp_path / "run")
    for name in (RESULT, METRICS):
        (folder / name).unlink()
        (folder / name).mkdir()
    (folder / CHECKPOINTS).write_text("no folder")
    found = run_at(folder)
    assert {problem.split(":")[0] for problem in found.problems} == {RESULT, METRICS, CHECKPOINTS}


def test_a_curve_has_every_whole_line_and_says_what_it_left_out(tmp_path):
    content = (
        line(1) + "rubbish\n" + line(2, validation_loss=2.0) + '{"step": -1}\n' + line(3, loss=None) + '{"step": 4'
    )
    run = run_at(made(tmp_path / "run", metrics=content.encode(), steps=3))
    curve, problems = curve_of(run)
    assert curve.losses == ((1, 5.0), (2, 2.5))
    assert curve.validation == ((2, 2.0), (3, 1.75))
    assert problems == (
        "metrics.jsonl: line 2 is no step of a training",
        "metrics.jsonl: line 4 is no step of a training",
        "metrics.jsonl: its last line is cut",
    )


def test_many_bad_lines_are_counted(tmp_path):
    run = run_at(made(tmp_path / "run", metrics=b"x\n" * 100 + line(1).encode()))
    assert curve_of(run)[1][-1] == "metrics.jsonl: 97 more lines are no step of a training"


def test_configurations_differ_in_the_keys_that_are_not_the_same(tmp_path):
    one = run_at(made(tmp_path / "a"))
    other = run_at(
        made(tmp_path / "b", config=b"training: {max_steps: 8, learning_rate: 0.1}\nmodel: {dropout: 0.1}\n")
    )
    assert differences([config_of(one), config_of(other)]) == {
        "training.learning_rate": [0.01, 0.1],
        "data.seed": [1, None],
        "model.dropout": [None, 0.1],
    }


def test_a_folder_with_checkpoints_alone_is_a_run(tmp_path):
    assert not is_run(tmp_path)
    (tmp_path / CHECKPOINTS / "step-00000003").mkdir(parents=True)
    (tmp_path / CHECKPOINTS / "notes").mkdir()
    assert run_at(tmp_path).checkpoints == 1


def test_listing_runs_imports_no_torch(tmp_path):
    made(tmp_path / "a")
    code = (
        "import sys\nfrom tightfit.training.run_folders.records import runs_in, checkpoints_of\n"
        f"assert runs_in({str(tmp_path)!r})\ncheckpoints_of({str(tmp_path / 'a')!r})\nassert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
