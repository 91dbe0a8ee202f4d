import io
import json
import os
import signal
from dataclasses import replace

import pytest
import yaml
from rich.console import Console

from command_line import tightfit
from quick_trainings import leave_out_pictures
from tightfit.cli.progress import ProgressReporter, Screen
from tightfit.cli.training import outcome
from tightfit.training.reporter import Start
from tightfit.training.result import StepMetrics, TrainResult

TEXT = "the quick brown fox jumps over the lazy dog\n" * 400


@pytest.fixture
def config(tmp_path):
    """Writes a training of three small steps, with these sections laid over it, and gives its path."""

    def write(**sections):
        (tmp_path / "text.txt").write_text(TEXT)
        content = {
            "model": {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "vocab_size": 300,
                "max_position_embeddings": 64,
            },
            "data": {"source": str(tmp_path / "text.txt"), "sequence_length": 32, "vocab_size": 300},
            "training": {"max_steps": 3, "batch_size": 4},
            "memory": {"budget": "0.95x", "levers": "exact"},
            "output": {"folder": str(tmp_path / "run")},
        }
        for name, keys in sections.items():
            content[name] = {**content[name], **keys}
        path = tmp_path / "training.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def test_a_training_ends_with_plain_predicted_and_measured_and_generates(config, tmp_path):
    done = tightfit("train", config())
    assert done.code == 0, done.err
    assert "step 1/3  loss " in done.err
    assert "peak memory" in done.out
    assert "Loss " in done.out
    assert f"The run is in {tmp_path / 'run'}" in " ".join(done.out.split())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["measured_peak_bytes"] <= result["budget_bytes"]
    text = tightfit("generate", tmp_path / "run", "--prompt", "the quick", "--max-new-tokens", 3, "--seed", 1)
    assert text.out.startswith("the quick")
    assert tightfit("generate", tmp_path / "run", "--prompt", "the quick", "--max-new-tokens", 3, "--seed", 1) == text


def test_device_names_where_a_training_runs(config):
    assert "device 'b200' is not in this machine" in refused(config(), "--device", "b200")
    assert "training.device" in refused(config(), "--device", "")


def refused(config, *overrides, code=2):
    done = tightfit("train", config, *overrides)
    assert done.code == code
    assert done.out == ""
    return done.error


def test_an_empty_corpus_and_a_broken_line_are_told_by_place(config, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "holds no text" in refused(config(data={"source": str(tmp_path / "empty.txt")}))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "fine"}\n{"text": broken}\n')
    assert f"{lines}, line 2, column 10: not valid JSON" in refused(config(data={"source": str(lines)}))


def test_a_vocabulary_larger_than_the_models_is_refused(config):
    assert "larger than the model's of 260" in refused(config(model={"vocab_size": 260}))


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_read(config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    line = refused(config(output={"folder": str(tmp_path / "file" / "run")}, data={"source": str(tmp_path / "none")}))
    assert "cannot be written" in line


def test_a_budget_that_nothing_fits_ends_with_its_own_exit_code(config):
    assert "cannot fit: the least is" in refused(config(), "memory.budget=1KB", code=3)


@pytest.mark.keeps("ctrl-c-sigterm-sighup")
def test_ctrl_c_keeps_what_is_done_and_ends_with_130(config, monkeypatch, tmp_path):
    def interrupt_after_one(self, metrics):
        if metrics.step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressReporter, "on_step", interrupt_after_one)
    file = config(memory={"budget": None})
    done = tightfit("train", file, f"output.folder={tmp_path}/a run", "--device", "cpu")
    assert done.code == 130
    assert "peak memory" in done.out
    lines = done.out.splitlines()
    again = lines[lines.index("Stopped after 1 of 3 steps, and a checkpoint is kept. To go on:") + 1]
    assert again == f"  tightfit train {file} 'output.folder={tmp_path}/a run' training.device=cpu --resume"
    assert json.loads((tmp_path / "a run" / "result.json").read_text())["interrupted"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_keep_what_is_done_too_and_end_with_their_code(config, monkeypatch, tmp_path, number):
    def end_after_one(self, metrics):
        if metrics.step == 1:
            signal.raise_signal(number)

    monkeypatch.setattr(ProgressReporter, "on_step", end_after_one)
    leave_out_pictures(monkeypatch)
    done = tightfit("train", config(memory={"budget": None}))
    assert done.code == 128 + number
    assert "peak memory" in done.out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["interrupted"]


START = Start(max_steps=30, log_every=1, predicted_peak_bytes=2**28, predicted_step_seconds=1.0, budget_bytes=2**29)


def metrics(step):
    return StepMetrics(step, 5.25, 1e-3, 0.5, 100 * step, 1234.0, 0.1, 700 * 2**20)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_shows_steps_loss_speed_and_memory_on_one_line(width):
    screen = io.StringIO()
    reporter = ProgressReporter(Console(file=screen, force_terminal=True, width=width, color_system=None))
    with reporter:
        reporter.on_start(START)
        reporter.on_step(metrics(7))
    last = screen.getvalue().split("\r")[-1].splitlines()[0]
    assert "7/30" in last
    assert "loss 5.250  peak 256M of 512M budget" in last
    assert ("budget  1,234 tok/s" in last) == (width >= 80)
    assert ("tok/s  process 700M" in last) == (width >= 120)
    assert len(last.removeprefix("\x1b[2K")) <= width


@pytest.mark.keeps("figure-memory-progress-line")
@pytest.mark.parametrize(("device", "name"), [("cpu", "process"), ("cuda", "allocated")])
def test_each_figure_of_memory_is_named_and_explained_once(device, name):
    screen = io.StringIO()
    reporter = ProgressReporter(Console(file=screen, width=80))
    with reporter:
        reporter.on_start(replace(START, device=device))
        for step in (1, 2, 3):
            reporter.on_step(metrics(step))
    out = screen.getvalue()
    assert "peak 256M of 512M budget  1,234 tok/s  " + name + " 700M" in out
    assert "now " not in out
    assert out.count(f"{name}: ") == 1


def test_the_held_out_loss_stands_beside_the_loss_of_the_step_that_was_evaluated():
    screen = io.StringIO()
    reporter = ProgressReporter(Console(file=screen, width=80))
    reporter.on_start(START)
    reporter.on_step(replace(metrics(1), validation_loss=4.5))
    reporter.on_step(metrics(30))
    first, last = screen.getvalue().splitlines()[-2:]
    assert "loss 5.250  held out 4.500  peak" in first
    assert "held out" not in last


def test_without_a_terminal_there_are_plain_lines_and_not_one_for_each_step():
    screen = io.StringIO()
    reporter = ProgressReporter(Console(file=screen, width=80))
    with reporter:
        reporter.on_start(START)
        for step in range(1, 31):
            reporter.on_step(metrics(step))
    legend, *lines = screen.getvalue().splitlines()
    assert legend.startswith("peak: ")
    assert lines[0].startswith("step 1/30  loss 5.250")
    assert lines[-1].startswith("step 30/30")
    assert 10 < len(lines) < 20
    assert "\x1b" not in screen.getvalue()


def test_a_training_outlives_whoever_reads_its_output():
    ours, theirs = os.pipe()
    os.close(ours)
    screen = os.fdopen(theirs, "w")
    with ProgressReporter(Screen(file=screen, width=80)) as reporter:
        reporter.on_start(START)
        reporter.on_step(metrics(1))
        reporter.on_note("nobody reads this")
    with pytest.raises(BrokenPipeError):
        screen.close()


def test_the_measured_peak_takes_the_place_of_the_predicted_one():
    screen = io.StringIO()
    reporter = ProgressReporter(Console(file=screen, width=80))
    reporter.on_start(START)
    reporter.on_peak(3 * 2**26)
    reporter.on_step(metrics(1))
    assert "peak 192M of 512M" in screen.getvalue()


RESULT = TrainResult(
        folder="runs/x", plain_peak_bytes=400, predicted_peak_bytes=200, measured_peak_bytes=100, budget_bytes=None,
        first_loss=9.0, last_loss=5.0, validation_loss=None, perplexity=None, tokens_per_second=10.0,
        predicted_step_seconds=1.0, measured_step_seconds=None, steps=2, skipped_steps=1, tokens=64, interrupted=False,
        parameters=5, precision="fp16", device="cpu", versions={}, sample="a\nb",
    )  # fmt: skip


def test_skipped_steps_and_unknown_times_are_told():
    text = outcome(RESULT, None, 80)
    assert "1 of 2 steps skipped" in text
    assert "50.0%" in text
    assert "25.0%" in text
    assert "Stopped" not in text


def test_only_a_cross_entropy_has_a_perplexity():
    assert "On held-out text 2.000 (perplexity 7.4)" in outcome(
        replace(RESULT, validation_loss=2, perplexity=7.4), None, 80
    )
    text = outcome(replace(RESULT, validation_loss=0.693), None, 80)
    assert "On held-out samples 0.693." in text
    assert "perplexity" not in text


def test_the_budget_is_no_share_of_a_plain_step_that_fits_in_it():
    assert "300.0%" not in outcome(replace(RESULT, budget_bytes=1200), None, 80)
    assert "75.0%" in outcome(replace(RESULT, budget_bytes=300), None, 80)


def test_only_files_that_were_written_are_named(tmp_path):
    result = replace(RESULT, folder=str(tmp_path))
    assert outcome(result, None, 400).endswith(f"The run is in {tmp_path}.")
    (tmp_path / "report.html").touch()
    assert f"{tmp_path}: report.html shows the step." in outcome(result, None, 400)
    (tmp_path / "memory.png").touch()
    (tmp_path / "plan.json").touch()
    assert "memory.png and report.html show the step, plan.json has the figures." in outcome(result, None, 400)


@pytest.mark.slow  # a whole training
def test_a_long_path_is_told_whole(config, tmp_path):
    folder = tmp_path / "-".join(["a-rather-long-name"] * 8)
    done = tightfit("train", config(), f"output.folder={folder}")
    assert str(folder) in done.out
