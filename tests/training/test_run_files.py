import json
import sys
from pathlib import Path

import pytest
import torch
from made_up_fits import leave_out_predictions
from tiny_training import Listener, metrics, run, settings

from drawn_figures import drawn_figures, lines
from quick_trainings import leave_out_pictures
from tightfit import Plan
from tightfit.errors import OutputError
from tightfit.training.api import train
from tightfit.units import format_bytes

BUDGET = {"budget": "0.6x", "levers": "exact"}


def test_the_result_names_what_was_predicted_measured_and_reached(tmp_path: Path):
    run(tmp_path, training={"max_steps": 6})

    result = json.loads((tmp_path / "run" / "result.json").read_text())

    figures = ("predicted_step_seconds", "measured_step_seconds", "tokens_per_second", "first_loss", "last_loss")
    assert all(result[name] > 0 for name in figures)
    assert (result["steps"], result["skipped_steps"], result["tokens"]) == (6, 0, 6 * 8 * 32)
    assert result["versions"]["torch"] == torch.__version__
    assert len(result["sample"]) > 0


def test_a_training_whose_sample_fails_has_its_result_and_says_why_there_is_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def overflowing(*_, **__):
        raise OverflowError("number too large to fit in target type")

    leave_out_pictures(monkeypatch)
    leave_out_predictions(monkeypatch)
    monkeypatch.setattr("tightfit.training.run.sample_text", overflowing)
    listener = Listener()

    train(settings(tmp_path, training={"max_steps": 2}), reporter=listener)

    assert json.loads((tmp_path / "run" / "result.json").read_text())["sample"] == ""
    assert any(
        "no text could be sampled: OverflowError: number too large" in line
        for kind, line in listener.told
        if kind == "note"
    )


@pytest.mark.slow  # a whole training with its pictures
def test_the_picture_shows_what_was_planned_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = drawn_figures(monkeypatch)

    run(tmp_path, memory=BUDGET)

    assert (tmp_path / "run" / "memory.png").read_bytes().startswith(b"\x89PNG")
    plan = Plan.from_json(tmp_path / "run" / "plan.json")
    measured = json.loads((tmp_path / "run" / "result.json").read_text())["measured_peak_bytes"]
    (figure,) = figures
    title = figure.get_suptitle()
    for name, size in (
        ("plain", plan.plain_peak_bytes), ("planned", plan.peak_bytes), ("measured", measured),
        ("budget", plan.budget_bytes),
    ):  # fmt: skip
        assert f"{name} {format_bytes(size)}" in title
    plain, planned = figure.axes
    assert (plain.get_title(), planned.get_title()) == ("Plain: no lever", "Planned: as it ran")
    assert lines(planned)["measured peak"][0][1] == measured / 2**20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", [BUDGET, {"recompute": {}}, {}], ids=["plan", "by hand", "plain"])
def test_the_page_says_what_was_measured(tmp_path: Path, memory: dict):
    run(tmp_path, memory=memory)

    page = (tmp_path / "run" / "report.html").read_text()
    measured = json.loads((tmp_path / "run" / "result.json").read_text())["measured_peak_bytes"]
    assert f'"measured": {measured}' in page
    assert "measured peak" in page


def test_metrics_are_written_for_logged_steps_and_for_the_first_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leave_out_pictures(monkeypatch)
    leave_out_predictions(monkeypatch)
    run(tmp_path, training={"max_steps": 8, "log_every": 3})

    lines = metrics(tmp_path)

    assert [line["step"] for line in lines] == [1, 3, 6, 8]
    assert [line["tokens"] for line in lines] == [step * 8 * 32 for step in (1, 3, 6, 8)]
    assert set(lines[0]) == {
        "step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "seconds", "memory_bytes",
        "skipped",
    }  # fmt: skip


@pytest.mark.parametrize(("module", "file"), [("matplotlib.figure", "memory.png"), ("plotly.offline", "report.html")])
def test_a_training_without_what_draws_has_no_picture_but_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, file: str
):
    monkeypatch.setitem(sys.modules, module, None)
    listener = Listener()

    train(settings(tmp_path), reporter=listener)

    assert any("pip install 'tightfit[report]'" in line for name, line in listener.told if name == "note")
    assert not (tmp_path / "run" / file).exists()
    assert (tmp_path / "run" / "result.json").exists()


def test_a_run_is_overwritten_only_where_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leave_out_pictures(monkeypatch)
    leave_out_predictions(monkeypatch)
    run(tmp_path, memory=BUDGET)

    with pytest.raises(OutputError, match="holds an earlier run"):
        run(tmp_path)
    run(tmp_path, output={"overwrite": True, "folder": str(tmp_path / "run")})

    assert not (tmp_path / "run" / "plan.json").exists()
