"""`tightfit runs`: real runs with checkpoints, listed, shown and compared."""

import json
import shutil
import struct
import sys
from pathlib import Path

import pytest

from command_line import tightfit
from quick_trainings import leave_out_measuring
from tightfit.training.api import train
from tightfit.training.config import parse_config
from tightfit.training.lock import locked

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs: one of six steps with checkpoints, one of four that differs in its learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 270, "max_position_embeddings": 16}
    data = {"source": str(folder / "text.txt"), "sequence_length": 16, "vocab_size": 270, "validation_fraction": 0.05}
    with pytest.MonkeyPatch.context() as patch:
        leave_out_measuring(patch)
        for name, steps, rate, checkpoint in (("long", 6, 1e-2, {"every_steps": 2}), ("short", 4, 1e-3, {})):
            training = {"max_steps": steps, "batch_size": 4, "learning_rate": rate, "device": "cpu"}
            output = {"folder": str(folder / name)}
            sections = {"model": shape, "data": data, "training": training, "checkpoint": checkpoint, "output": output}
            train(parse_config(sections))
    return folder


@pytest.fixture
def damaged(runs, tmp_path):
    """A copy of the run with checkpoints, which a test may damage."""
    return Path(shutil.copytree(runs / "long", tmp_path / "long"))


def test_the_list_has_a_row_for_each_run_and_is_json_where_asked(runs):
    lines = tightfit("runs", runs).out.splitlines()
    assert lines[2].split()[:3] == ["long", "finished", "6"]
    assert lines[3].split()[:3] == ["short", "finished", "4"]
    long, short = json.loads(tightfit("runs", runs, "--json").out)
    result = json.loads((runs / "long" / "result.json").read_text())
    for name, key in (("loss", "last_loss"), ("validation_loss", "validation_loss"), ("steps", "steps")):
        assert long[name] == result[key]
    assert (long["checkpoints"], short["checkpoints"]) == (2, 0)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_a_narrow_terminal_keeps_names_and_states_and_says_what_it_leaves_out(runs, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    head, _, long, short, *rest = tightfit("runs", runs).out.splitlines()
    assert long.split()[:2] == ["long", "finished"]
    assert short.split()[:2] == ["short", "finished"]
    for name in ("loss", "predicted", "tok/s", "size"):
        assert (name in head) != (name in " ".join(rest))
    assert max(map(len, (head, long, short, *rest))) <= max(width, 60)


def test_every_state_has_its_word(runs, damaged):
    (damaged / "result.json").unlink()
    assert "killed" in tightfit("runs", damaged.parent).out
    with locked(damaged):
        assert "running" in tightfit("runs", damaged.parent).out
        assert "running (process " in tightfit("runs", "show", damaged).out


def test_a_run_is_shown_with_its_checkpoints_and_what_is_wrong_with_them(runs, damaged):
    out = tightfit("runs", "show", runs / "long", "--verify").out
    assert "step 4" in out
    assert out.count(" intact") == 2
    older, newer = (damaged / "checkpoints" / f"step-0000000{step}" / "tensors.safetensors" for step in (4, 6))
    content = bytearray(newer.read_bytes())
    content[-1] ^= 1
    newer.write_bytes(content)
    older.write_bytes(older.read_bytes()[:-1])
    quick, thorough = (json.loads(tightfit("runs", "show", damaged, "--json", *v).out) for v in ((), ("--verify",)))
    assert [c["problem"] is None for c in quick["checkpoints"]] == [False, True]  # sizes alone
    assert [c["problem"] is None for c in thorough["checkpoints"]] == [False, False]
    text = tightfit("runs", "show", damaged, "--verify").out
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("step ")] == ["damaged", "damaged"]
    assert f"{newer.parent}:" in text
    assert "Traceback" not in text


def test_what_lies_among_checkpoints_and_is_none_is_left_out(damaged):
    (damaged / "checkpoints" / "notes.txt").write_text("mine")
    (damaged / "checkpoints" / "step-00000009").write_text("a file")
    shown = json.loads(tightfit("runs", "show", damaged, "--json").out)["checkpoints"]
    assert [c["step"] for c in shown] == [4, 6, 9]
    assert shown[-1]["problem"]


def test_runs_are_compared_by_configuration_result_and_picture(runs, tmp_path):
    picture = tmp_path / "losses.png"
    done = tightfit("runs", "compare", runs / "long", runs / "short", "--output", picture)
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines() if line.strip()}
    assert rows["training.learning_rate"] == ["0.01", "0.001"]
    assert rows["training.max_steps"] == ["6", "4"]
    assert "training.batch_size" not in rows
    assert "model.hidden_size" not in rows
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1200, 600)
    found = json.loads(tightfit("runs", "compare", runs / "long", runs / "long", "--json").out)
    assert found["differences"] == {}
    assert [run["steps"] for run in found["runs"]] == [6, 6]


def test_what_cannot_be_done_is_one_line(runs, tmp_path, monkeypatch):
    for arguments, message in (
        ((tmp_path / "none",), "no such folder"),
        (("show", tmp_path), "holds no run"),
        (("compare", runs / "long"), "takes the folders of two runs or more"),
        (("compare", runs / "long", tmp_path), "holds no run"),
        (("compare", runs / "long", runs / "short", "--output", tmp_path / "no" / "x.png"), "cannot be written"),
    ):
        done = tightfit("runs", *arguments)
        assert done.code == 2
        assert message in done.error
    assert tightfit("runs", tmp_path).out == f"{tmp_path} holds no runs.\n"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = tightfit("runs", "compare", runs / "long", runs / "short", "--output", tmp_path / "x.png")
    assert "needs the package matplotlib" in done.error


def test_the_default_folder_is_runs(runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    assert tightfit("runs").error.startswith("runs: no such folder")


@pytest.mark.keeps("killed-run-generates-scored")
def test_a_killed_run_generates_and_is_scored_with_the_weights_of_its_newest_intact_checkpoint(runs, damaged):
    asked = ("--prompt", "the quick", "--max-new-tokens", "5", "--seed", "1")
    whole = tightfit("generate", damaged, *asked)
    for name in ("model.safetensors", "config.json", "result.json"):
        (damaged / name).unlink()
    killed = tightfit("generate", damaged, *asked)
    assert (killed.code, killed.out) == (0, whole.out)
    assert killed.err == f"the weights are those of {damaged / 'checkpoints' / 'step-00000006'}\n"
    scored = [
        json.loads(tightfit("score", run, "--file", runs / "text.txt", "--max-tokens", "9", "--json").out)
        for run in (runs / "long", damaged)
    ]
    assert scored[0] == scored[1]
    (damaged / "checkpoints" / "step-00000006" / "manifest.json").write_text("{}")
    older = tightfit("generate", damaged, *asked)
    assert older.err.splitlines()[0].startswith("passed over: ")
    assert older.err.endswith("step-00000004\n")
    (damaged / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    assert "no checkpoint is intact" in tightfit("generate", damaged, *asked).error
    shutil.rmtree(damaged / "checkpoints")
    assert "give the folder of a finished run" in tightfit("generate", damaged, *asked).error
