import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_fits import leave_out_predictions, made_up_fit
from tiny_training import Listener, metrics, run, settings

import tightfit
from quick_trainings import leave_out_pictures
from tightfit.errors import (
    BudgetError,
    CannotFit,
    ConfigError,
    DataError,
    LeverError,
    OutputError,
    VerificationFailed,
)
from tightfit.models.generation import generate_text
from tightfit.models.saving import load_model
from tightfit.planner.plans import Plan
from tightfit.training import loop
from tightfit.training.api import train
from tightfit.training.config import load_config
from tightfit.training.data.tokenizer import load_tokenizer
from tightfit.verification import Difference, Verification

BUDGET = {"budget": "0.6x", "levers": "exact"}


@pytest.fixture(autouse=True)
def _neither_picture_nor_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)


@pytest.mark.keeps("peak-training-measured-equals")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("memory", [{}, BUDGET], ids=["plain", "planned"])
def test_the_measured_peak_is_the_predicted_one(tmp_path: Path, precision: str, memory: dict[str, Any]):
    result = run(tmp_path, training={"precision": precision}, memory=memory)

    assert result.measured_peak_bytes == pytest.approx(result.predicted_peak_bytes, rel=1e-3)
    if memory:
        assert result.budget_bytes == int(0.6 * result.plain_peak_bytes)
        assert result.measured_peak_bytes <= result.budget_bytes
    else:
        assert result.predicted_peak_bytes == result.plain_peak_bytes


DROPPING: dict[str, dict[str, Any]] = {"training": {"max_steps": 10}, "model": {"dropout": 0.1}}


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a training that recomputes nothing."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        leave_out_predictions(patch)
        run(folder, **DROPPING)
    return [line["loss"] for line in metrics(folder)]


@pytest.mark.keeps("training-recomputes-losses-bit")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", [BUDGET, {"recompute": {}}, {"recompute": {"segments": 2}}], ids=str)
def test_recomputing_moves_no_loss_by_a_bit(tmp_path: Path, plain_losses: list[float], memory: dict[str, Any]):
    result = run(tmp_path, memory=memory, **DROPPING)

    assert result.predicted_peak_bytes < result.plain_peak_bytes
    assert [line["loss"] for line in metrics(tmp_path)] == plain_losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_by_hand_is_predicted_too(tmp_path: Path, reentrant: bool):
    blocks = 3
    result = run(
        tmp_path,
        model={"num_layers": blocks},
        memory={"recompute": {"blocks": "layers.*", "use_reentrant": reentrant}},
    )

    assert result.budget_bytes is None
    assert result.predicted_peak_bytes < result.plain_peak_bytes
    assert result.measured_peak_bytes == pytest.approx(result.predicted_peak_bytes, rel=1e-3)


@pytest.mark.slow  # two whole trainings
def test_accumulated_micro_batches_train_as_the_whole_batch_does(tmp_path: Path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    for folder in (whole, split):
        folder.mkdir()

    one = run(whole)
    four = run(split, training={"gradient_accumulation_steps": 4})

    assert four.measured_peak_bytes < one.measured_peak_bytes
    assert [line["loss"] for line in metrics(split)] == pytest.approx([line["loss"] for line in metrics(whole)])


@pytest.mark.keeps("peak-training-measured-equals")
@pytest.mark.slow  # a plan of every lever, and a training
def test_every_lever_together_stays_within_the_budget(tmp_path: Path):
    result = run(tmp_path, training={"batch_size": 4}, memory={"budget": "0.5x", "levers": "rounding"})

    assert result.budget_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes
    assert result.measured_peak_bytes == pytest.approx(result.predicted_peak_bytes, rel=1e-3)


@pytest.mark.keeps("plan-uses-fewest-micro")
def test_micro_batches_that_the_plan_counts_keep_the_batch_and_the_schedule(tmp_path: Path):
    plain, automatic = tmp_path / "plain", tmp_path / "automatic"
    for folder in (plain, automatic):
        folder.mkdir()
    training = {"batch_size": 8, "warmup_steps": 2}
    run(plain, training=training)
    result = run(
        automatic,
        training={**training, "gradient_accumulation_steps": "auto"},
        memory={"budget": "0.6x", "levers": ["micro_batch"]},  # searching the blocks too takes four times as long
    )

    assert Plan.from_json(automatic / "run" / "plan.json").micro_batches > 1
    assert result.budget_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes
    for key in ("tokens", "learning_rate"):
        assert [line[key] for line in metrics(automatic)] == [line[key] for line in metrics(plain)]
    losses = [line["loss"] for line in metrics(plain)]
    assert [line["loss"] for line in metrics(automatic)] == pytest.approx(losses, rel=1e-4)


@pytest.fixture
def _unpredicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about memory."""
    leave_out_predictions(monkeypatch)


@pytest.mark.usefixtures("_unpredicted")
def test_the_loss_falls(tmp_path: Path):
    result = run(tmp_path, training={"max_steps": 40, "warmup_steps": 4})

    assert result.last_loss < 0.6 * result.first_loss
    assert result.validation_loss == pytest.approx(result.last_loss, rel=0.3)
    assert result.perplexity == pytest.approx(torch.tensor(result.validation_loss).exp().item())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_trainings_are_measured_too(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tightfit.training.preparing.fit", made_up_fit)
    result = run(tmp_path, training={"max_steps": steps})

    assert result.measured_peak_bytes > 0
    assert (result.measured_step_seconds is None) == (steps < 3)


@pytest.mark.keeps("steps-overflow-fp16-skipped")
@pytest.mark.usefixtures("_unpredicted")
def test_a_step_that_overflows_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Extreme(torch.amp.GradScaler):
        """Its first scale is beyond what fp16 holds, its next one not."""

        def __init__(self, device: str):
            super().__init__(device, init_scale=2.0**40, backoff_factor=2.0**-30)

    monkeypatch.setattr(torch.amp, "GradScaler", Extreme)
    result = run(tmp_path, training={"precision": "fp16"})

    assert result.skipped_steps == 1
    assert [line["skipped"] for line in metrics(tmp_path)] == [True, False, False, False]
    assert metrics(tmp_path)[0]["grad_norm"] is None
    assert result.last_loss < result.first_loss


@pytest.mark.usefixtures("_unpredicted")
def test_the_same_seed_gives_the_same_losses_and_another_one_others(tmp_path: Path):
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        torch.manual_seed(len(name) * 12345 + len(losses))  # what the caller did before does not matter
        run(tmp_path / name, training={"seed": seed, "max_steps": 2}, model={"dropout": 0.1})
        losses.append([line["loss"] for line in metrics(tmp_path / name)])

    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.usefixtures("_unpredicted")
def test_the_number_of_threads_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, inside = torch.get_num_threads(), []
    real = loop.memory_now
    monkeypatch.setattr(loop, "memory_now", lambda device: inside.append(torch.get_num_threads()) or real(device))

    run(tmp_path, training={"num_threads": 1, "max_steps": 2})

    assert set(inside) == {1}
    assert torch.get_num_threads() == before


def test_the_reporter_is_told_each_stage_in_order_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    listener = Listener()

    train(settings(tmp_path, memory=BUDGET), reporter=listener)

    stages = [name for name, _ in listener.told if name != "note"]
    assert stages == ["plan", "start", "step", "peak", "step", "step", "peak", "step", "end"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"data": {"source": "missing.txt"}}, DataError, "no such file"),
        ({"model": {"vocab_size": 260}}, ConfigError, "vocabulary of 300 .* larger than the model's of 260"),
        ({"memory": {"recompute": {"blocks": "nowhere.*"}}}, LeverError, "no module matches 'nowhere"),
        ({"memory": {"recompute": {"segments": 9}}}, LeverError, "segments=9 is out of range"),
    ],
    ids=["data", "vocabulary", "blocks", "segments"],
)
def test_what_is_wrong_is_said_before_training(
    tmp_path: Path, sections: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        run(tmp_path, **sections)

    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.usefixtures("_unpredicted")
def test_overrides_are_laid_over_a_configuration(tmp_path: Path):
    assert train(settings(tmp_path), ["training.max_steps=2"]).steps == 2


def test_a_verified_plan_is_said_to_be_equal(tmp_path: Path):
    listener = Listener()

    train(settings(tmp_path, memory={**BUDGET, "verify": True}), reporter=listener)

    assert any("bit-equal" in line for name, line in listener.told if name == "note")


def test_a_plan_that_changes_a_gradient_is_not_trained_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    unequal = Verification(False, True, 3, Difference("gradient of head.weight", 0.5, "recompute", "layers.1"))
    monkeypatch.setattr("tightfit.verification.verify", lambda *_, **__: unequal)

    with pytest.raises(VerificationFailed, match=r"head.weight differs .* recompute in layers.1"):
        run(tmp_path, memory={**BUDGET, "verify": True})


@pytest.mark.usefixtures("_unpredicted")
def test_the_public_name_trains_whatever_was_imported_before(tmp_path: Path):
    assert tightfit.train(settings(tmp_path)).steps == 4


def test_a_budget_below_zero_is_refused(tmp_path: Path):
    with pytest.raises((BudgetError, ConfigError), match="not above zero"):
        run(tmp_path, memory={"budget": 0})


@pytest.mark.keeps("run-folder-never-holds")
@pytest.mark.slow  # a whole training
def test_the_run_folder_holds_everything_and_nothing_half_written(tmp_path: Path):
    config = settings(tmp_path, memory=BUDGET)

    result = train(config)

    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "config.yaml", "memory.png", "metrics.jsonl", "model.safetensors", "plan.json",
        "report.html", "result.json", "tokenizer.json",
    }  # fmt: skip
    assert load_config(folder / "config.yaml") == config
    assert Plan.from_json(folder / "plan.json").budget_bytes == result.budget_bytes
    assert json.loads((folder / "result.json").read_text())["measured_peak_bytes"] == result.measured_peak_bytes
    assert generate_text(load_model(folder), load_tokenizer(folder), "The", max_new_tokens=2).startswith("The")


@pytest.mark.keeps("folder-cannot-written-reported")
def test_an_unwritable_folder_is_found_before_the_data_is_read(tmp_path: Path):
    config = settings(tmp_path, output={"folder": str(tmp_path / "corpus.txt" / "run")}, data={"source": "missing"})

    with pytest.raises(OutputError, match="cannot be written"):
        train(config)


@pytest.mark.keeps("folder-cannot-written-reported")
def test_an_earlier_run_survives_a_training_that_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        leave_out_predictions(patch)
        run(tmp_path)
    before = (tmp_path / "run" / "result.json").read_text()

    with pytest.raises(CannotFit):
        run(
            tmp_path,
            memory={"budget": "1KB", "levers": "exact"},
            output={"overwrite": True, "folder": str(tmp_path / "run")},
        )

    assert (tmp_path / "run" / "result.json").read_text() == before
