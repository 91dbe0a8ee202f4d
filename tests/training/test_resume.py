"""What `--resume` goes on with, what it refuses, and that nobody sees in the end where a run was interrupted."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from forked_trainings import TIMES
from made_up_fits import leave_out_predictions
from tiny_training import Listener, metrics, run, settings

from command_line import tightfit
from quick_trainings import leave_out_pictures
from tightfit.errors import CheckpointError, ConfigError, DataError, OutputError
from tightfit.training.api import train
from tightfit.training.checkpoint.names import part_name
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.config import Config, dump_config, parse_config
from tightfit.training.evaluation import HeldOutSums
from tightfit.training.result import StepMetrics, TrainResult
from tiny_adapters import saved_llama

EVERY_TWO = {"every_steps": 2}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not the subject takes no time."""
    leave_out_pictures(monkeypatch)
    leave_out_predictions(monkeypatch)


class Interrupts(Listener):
    """Sends this process a real signal after some step."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT):
        super().__init__()
        self.step, self.number = step, number

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        if metrics.step == self.step:
            signal.raise_signal(self.number)


def interrupted(config: Config, step: int, *, resume: bool = False) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config, reporter=Interrupts(step), resume=resume)


def notes(listener: Listener) -> list[str]:
    return [line for name, line in listener.told if name == "note"]


def timeless(folder: Path) -> tuple[Any, ...]:
    """A run's folder but for times and measured bytes."""
    result = json.loads((folder / "run" / "result.json").read_text())
    moving = (*TIMES, "resumed_from", "folder")
    lines = [{key: value for key, value in line.items() if key not in TIMES} for line in metrics(folder)]
    weights = (folder / "run" / "model.safetensors").read_bytes()
    return lines, {key: value for key, value in result.items() if key not in moving}, weights


@pytest.mark.keeps("run-interrupted-resumed-ends")
@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dropout": 0.1}, "training": {"gradient_accumulation_steps": 2, "schedule": "wsd"}},
        pytest.param({"training": {"precision": "fp16"}}, marks=pytest.mark.slow),  # the state alone: test_state.py
        pytest.param(
            {"training": {"step_in_backward": True, "grad_clip": None}, "model": {"dropout": 0.1}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"memory": {"budget": "0.6x", "levers": "exact", "max_slowdown": None}, "model": {"dropout": 0.1}},
            marks=pytest.mark.slow,  # two plans
        ),
    ],
    ids=["accumulation", "scaler", "step in backward", "planned"],
)
def test_an_interrupted_run_ends_as_the_one_that_was_not(tmp_path: Path, sections: dict[str, Any]):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    sections = {**sections, "training": {"max_steps": 7, "log_every": 2, **sections.get("training", {})}}
    run(whole, **sections)
    config = settings(cut, **sections, data={"source": str(whole / "corpus.txt")})

    interrupted(config, 3)
    assert json.loads((cut / "run" / "result.json").read_text())["interrupted"]
    interrupted(config, 5, resume=True)
    result = train(config, resume=True)

    assert result.resumed_from == 5
    assert timeless(cut) == timeless(whole)


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
def test_no_checkpoint_begins_and_says_so(tmp_path: Path):
    listener = Listener()

    result = train(settings(tmp_path), reporter=listener, resume=True)

    assert (result.steps, result.resumed_from) == (4, None)
    assert any("no checkpoint to resume from: the training begins at step 1" in line for line in notes(listener))


def test_a_folder_with_checkpoints_alone_is_a_run_too(tmp_path: Path):
    config = settings(tmp_path)
    interrupted(config, 2)
    for path in (tmp_path / "run").iterdir():
        if path.is_file():
            path.unlink()

    with pytest.raises(OutputError, match=r"holds an earlier run \(checkpoints\): go on with it with --resume"):
        train(config)
    assert train(config, resume=True).resumed_from == 2


def test_what_a_kill_after_the_last_save_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = settings(tmp_path, checkpoint={**EVERY_TWO, "keep_last": 1})
    folder = tmp_path / "run" / "checkpoints"

    class Killed(BaseException):
        pass

    def kill(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        if len(self.listed()) == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "prune", kill)
        with pytest.raises(Killed):
            train(config)
    (folder / part_name("step-00000001")).mkdir()
    assert [entry.step for entry in Checkpoints(folder).listed()] == [2, 4]

    assert train(config, resume=True).resumed_from == 4

    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["step-00000004"]


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
def test_a_finished_run_stays_as_it_is(tmp_path: Path):
    config = settings(tmp_path, checkpoint=EVERY_TWO)
    first = train(config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    listener = Listener()

    again = train(config, reporter=listener, resume=True)

    assert again == first
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert any("the run is finished, after 4 steps" in line for line in notes(listener))


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
def test_more_steps_go_on_from_the_last_one(tmp_path: Path):
    longer, whole = tmp_path / "longer", tmp_path / "whole"
    for folder in (longer, whole):
        folder.mkdir()
    training = {"schedule": "constant", "log_every": 2, "max_steps": 3}
    config = settings(longer, training=training, checkpoint=EVERY_TWO, data={"source": str(whole / "corpus.txt")})
    run(whole, training={**training, "max_steps": 6}, checkpoint=EVERY_TWO)
    train(config)

    result = train(config, ["training.max_steps=6"], resume=True)

    assert (result.steps, result.resumed_from) == (6, 3)
    assert timeless(longer) == timeless(whole)


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
def test_a_finished_run_without_a_checkpoint_is_not_begun_anew_for_more_steps(tmp_path: Path):
    config = settings(tmp_path, training={"max_steps": 1})
    train(config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    with pytest.raises(
        CheckpointError, match=r"finished, after 1 steps, .* where checkpoint\.every_steps is set; "
    ) as no:
        train(config, ["training.max_steps=2"], resume=True)

    assert no.value.exit_code == 2
    assert "\n" not in str(no.value)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training.learning_rate=0.5", r"training.learning_rate is 0.5, and 0.01 in .*config.yaml"),
        ("model.dropout=0.2", r"model.dropout is 0.2, and 0.0 in "),
        ("data.seed=3", "data.seed is 3, and 0 in "),
        ("training.max_steps=1", r"training.max_steps is 1, and .*step-00000002 is beyond it"),
    ],
)
def test_what_would_train_something_else_is_refused(tmp_path: Path, override: str, line: str):
    config = settings(tmp_path)
    interrupted(config, 2)

    with pytest.raises(ConfigError, match=line):
        train(config, [override], resume=True)


@pytest.mark.keeps("resumed-run-keeps-plan")
def test_what_trains_the_same_may_change(tmp_path: Path):
    config = settings(tmp_path)
    interrupted(config, 2)
    changed = ["training.log_every=3", "memory.recover=false", "checkpoint.keep_last=1", "training.num_threads=1"]

    result = train(config, changed, resume=True)

    assert (result.steps, result.resumed_from) == (4, 2)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
def test_other_data_is_refused(tmp_path: Path):
    config = settings(tmp_path)
    interrupted(config, 2)
    with (tmp_path / "corpus.txt").open("a") as corpus:
        corpus.write("One line more.\n")

    with pytest.raises(DataError, match=r"the samples are not those that .* was trained on"):
        train(config, resume=True)


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path):
    config = settings(tmp_path, checkpoint=EVERY_TWO)
    expected = train(config)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    (tmp_path / "run" / "result.json").unlink()
    with (newest / "tensors.safetensors").open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"damaged")
    listener = Listener()

    result = train(config, reporter=listener, resume=True)

    assert any("passed over" in line and newest.name in line for line in notes(listener))
    assert (result.resumed_from, result.last_loss) == (2, expected.last_loss)


@pytest.mark.keeps("resume-passes-damaged-checkpoints")
def test_where_nothing_is_intact_one_line_says_so_and_nothing_moves(tmp_path: Path):
    config = settings(tmp_path, checkpoint=EVERY_TWO)
    train(config)
    (tmp_path / "run" / "result.json").unlink()
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()

    with pytest.raises(CheckpointError, match=r"no checkpoint is intact \(2 passed over.*manifest.json is missing"):
        train(config, resume=True)

    assert (tmp_path / "run" / "model.safetensors").exists()


def test_overwriting_clears_checkpoints_too(tmp_path: Path):
    config = settings(tmp_path, checkpoint=EVERY_TWO)
    train(config)

    train(config, ["output.overwrite=true", "checkpoint.every_steps=null"])

    assert not (tmp_path / "run" / "checkpoints").exists()


def test_checkpoints_of_the_best_loss_are_kept_beside_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr("tightfit.training.validating.held_out_sums", lambda *_, **__: HeldOutSums(next(losses), 1))

    run(tmp_path, checkpoint={"every_steps": 1, "keep_last": 1, "keep_best": 1})

    kept = [entry.step for entry in Checkpoints(tmp_path / "run" / "checkpoints").listed()]
    assert kept == [2, 4]


@pytest.mark.keeps("resumed-run-keeps-plan")
def test_the_planned_step_is_the_same_after_a_resume_though_seconds_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = settings(
        tmp_path,
        model={"hidden_size": 16, "num_layers": 1},
        training={"batch_size": 4},
        memory={"budget": "0.9x", "levers": "exact"},
    )
    interrupted(config, 2)
    planned = json.loads((tmp_path / "run" / "plan.json").read_text())

    def no_plan(*_: Any, **__: Any) -> None:
        raise AssertionError("the plan is the checkpoint's")

    monkeypatch.setattr("tightfit.training.fitting.plan_asked", no_plan)
    train(config, resume=True)

    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == planned


@pytest.mark.slow  # a plan before and one after
def test_another_budget_makes_another_plan(tmp_path: Path):
    config = settings(tmp_path, memory={"budget": "0.9x", "levers": "exact"})
    interrupted(config, 2)

    result = train(config, ["memory.budget=0.7x"], resume=True)

    assert (result.resumed_from, result.budget_bytes) == (2, int(0.7 * result.plain_peak_bytes))


def test_lines_of_metrics_after_the_checkpoint_are_dropped(tmp_path: Path):
    config = settings(tmp_path, training={"max_steps": 5}, checkpoint={"every_steps": 2})
    expected = train(config)
    before = metrics(tmp_path)
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000005")

    assert train(config, resume=True).last_loss == expected.last_loss

    assert [line["loss"] for line in metrics(tmp_path)] == [line["loss"] for line in before]


def test_the_command_line_resumes_refuses_and_leaves_alone(tmp_path: Path):
    config = tmp_path / "training.yaml"
    config.write_text(dump_config(settings(tmp_path, checkpoint=EVERY_TWO)))
    assert tightfit("train", config).code == 0

    finished = tightfit("train", config, "--resume")
    assert (finished.code, finished.out) == (0, "")
    assert "the run is finished" in finished.err
    refused = tightfit("train", config)
    assert refused.code == 2
    assert "--resume" in refused.error
    other = tightfit("train", config, "--resume", "training.batch_size=4")
    assert other.code == 2
    assert "training.batch_size is 4, and 8 in" in other.error
    longer = tightfit("train", config, "--resume", "training.max_steps=6")
    assert longer.code == 0
    assert "in 6 steps" in longer.out
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_text("{}")
    lost = tightfit("train", config, "--resume", "training.max_steps=8")
    assert lost.code == 2
    assert "no checkpoint is intact" in lost.error


def test_a_result_of_an_earlier_version_is_read():
    new = ("resumed_from", "skipped_lines", "max_steps")
    figures = {name: 1 for name in TrainResult.__dataclass_fields__ if name not in new}

    result = TrainResult.from_json(json.dumps(figures))

    assert (result.resumed_from, result.skipped_lines, result.max_steps) == (None, 0, None)


@pytest.mark.parametrize("base", [pytest.param("fp32", marks=pytest.mark.slow), "int8"])
def test_adapters_go_on_to_the_bit_and_their_base_is_not_saved(tmp_path: Path, base: str):
    model = saved_llama(tmp_path / "base")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    configs = []
    for folder in (whole, cut):
        folder.mkdir()
        raw = settings(folder, data={"source": str(tmp_path / "corpus.txt")}).model_dump(mode="json")
        raw["model"] = {"path": str(model), "adapter": {"r": 4, "base": base, "dropout": 0.1}}
        configs.append(parse_config(raw))
    shutil.copy(cut / "corpus.txt", tmp_path / "corpus.txt")
    train(configs[0])

    interrupted(configs[1], 2)
    checkpoint = Checkpoints(cut / "run" / "checkpoints").newest_intact().checkpoint
    train(configs[1], resume=True)

    assert checkpoint is not None
    assert all("lora" in name for name in checkpoint.specs if name.startswith("model.") and name.endswith("weight"))
    weights = [(folder / "run" / "adapter_model.safetensors").read_bytes() for folder in (whole, cut)]
    assert weights[0] == weights[1]
