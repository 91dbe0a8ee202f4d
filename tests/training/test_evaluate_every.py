"""Evaluations during a training: they are where they belong, they move nothing, and no signal loses one."""

import json
import math
import signal

import pytest
import torch
from held_out import evaluation_loss
from tiny_training import Listener, metrics, run, settings

from quick_trainings import leave_out_measuring
from tightfit.errors import ConfigError
from tightfit.models.saving import load_model
from tightfit.training import purpose, validating
from tightfit.training.api import train
from tightfit.training.config import parse_config
from tightfit.training.data.packing import PackedSamples
from tightfit.training.data.prepare import prepare_data
from tightfit.training.evaluation import held_out_sums
from tightfit.training.loop import StepHistory
from tightfit.training.objective import CausalLMLoss

EVERY_TWO = {"max_steps": 5, "evaluate_every": 2, "log_every": 4}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    leave_out_measuring(monkeypatch)


def test_the_lines_of_evaluated_steps_have_the_loss_and_the_others_do_not(tmp_path):
    result = run(tmp_path, training=EVERY_TWO)
    lines = {line["step"]: line.get("validation_loss") for line in metrics(tmp_path)}
    assert list(lines) == [1, 2, 4, 5]  # every fourth, the first, the last, and those that were evaluated
    assert lines[1] is lines[5] is None
    assert lines[2] > lines[4] > result.validation_loss
    assert result.perplexity == pytest.approx(math.exp(result.validation_loss))
    assert result.max_steps == 5


def test_the_loss_of_a_step_is_that_of_the_weights_after_it(tmp_path):
    run(tmp_path, training={**EVERY_TWO, "max_steps": 4})
    result = run(tmp_path, training={**EVERY_TWO, "max_steps": 4}, output={"overwrite": True})
    assert metrics(tmp_path)[-1]["validation_loss"] == result.validation_loss
    data = prepare_data(settings(tmp_path).data, settings(tmp_path).model)
    truth = evaluation_loss(load_model(tmp_path / "run"), data.validation, CausalLMLoss(), micro_batch_size=8)
    assert result.validation_loss == truth


@pytest.mark.keeps("evaluations-during-training-move")
def test_evaluations_move_nothing_of_the_training(tmp_path):
    shape = {"dropout": 0.3}
    plain = run(tmp_path, model=shape, training={**EVERY_TWO, "evaluate_every": None})
    weights = load_model(tmp_path / "run").state_dict()
    evaluated = run(tmp_path, model=shape, training=EVERY_TWO, output={"overwrite": True})
    assert evaluated.validation_loss == plain.validation_loss
    again = load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def counting(monkeypatch, at=None):
    """Counts evaluations, and sends a signal inside the one with the number `at`."""
    calls = []
    real = held_out_sums

    def counted(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(validating, "held_out_sums", counted)
    return calls


def test_a_step_that_was_evaluated_is_not_evaluated_again_at_the_end_or_for_the_best_checkpoint(tmp_path, monkeypatch):
    calls = counting(monkeypatch)
    checkpoint = {"every_steps": 2, "keep_best": 1}
    run(tmp_path, training={**EVERY_TWO, "max_steps": 4}, checkpoint=checkpoint)
    assert len(calls) == 2


TIMES = ("seconds", "tokens_per_second", "memory_bytes")


@pytest.mark.keeps("evaluations-during-training-move")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [1, 2])
def test_a_signal_inside_an_evaluation_loses_no_line_when_the_training_goes_on(tmp_path, monkeypatch, at):
    def lines(folder):
        return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(folder)]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    run(whole, training=EVERY_TWO)
    with monkeypatch.context() as patch:
        counting(patch, at=at)
        with pytest.raises(KeyboardInterrupt):
            run(cut, training=EVERY_TWO)
    assert lines(cut)[-1]["step"] == 2 * at
    assert "validation_loss" not in lines(cut)[-1]
    assert json.loads((cut / "run" / "result.json").read_text())["interrupted"]
    train(settings(cut, training=EVERY_TWO), resume=True)
    assert lines(cut) == lines(whole)


def test_the_lowest_held_out_loss_is_the_best_one():
    record = StepHistory()
    for step, loss in enumerate((3.0, 2.0, 2.5, float("nan")), start=1):
        record.steps = step
        record.evaluated(loss)
    assert record.best == (2, 2.0)
    assert record.validation[0] == 4
    record.steps = 5
    assert record.held_out() is None


@pytest.mark.keeps("runs-out-memory-halves")
def test_an_evaluation_that_is_out_of_memory_halves_its_own_batches_and_no_others(tmp_path, monkeypatch):
    truth = run(tmp_path, training=EVERY_TWO)
    sizes, trained = [], []

    class Narrow(CausalLMLoss):
        """Has room for the two rows of a sample and no more in an evaluation."""

        def __call__(self, model, batch):
            rows = len(batch["input_ids"])
            (trained if model.training else sizes).append(rows)
            if not model.training and rows > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9999 bytes.")
            return super().__call__(model, batch)

    monkeypatch.setattr(purpose, "objective_of", lambda name, training: Narrow())
    listener = Listener()
    result = train(settings(tmp_path, training=EVERY_TWO, output={"overwrite": True}), reporter=listener)
    assert result.validation_loss == pytest.approx(truth.validation_loss, rel=1e-6)
    assert result.last_loss == truth.last_loss
    notes = [line for kind, line in listener.told if kind == "note" and "the evaluation is out of memory" in line]
    assert notes[-1].endswith("it goes on with 2 samples at a time; the training's stay")
    assert sizes[:3] == [8, 4, 2]
    assert set(trained) == {8}


def test_one_sample_that_does_not_fit_raises_what_the_allocator_raised(monkeypatch):
    def full(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = torch.nn.Linear(1, 1)
    samples = PackedSamples(torch.zeros(3, 4, dtype=torch.int64).numpy())
    with pytest.raises(torch.OutOfMemoryError):
        evaluation_loss(model, samples, full, micro_batch_size=4)
    with pytest.raises(RuntimeError, match="a bug"):
        evaluation_loss(model, samples, lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")), micro_batch_size=4)


def test_evaluations_without_held_out_samples_are_refused():
    with pytest.raises(ConfigError, match=r"training.evaluate_every is set, and data.validation_fraction 0"):
        parse_config({"training": {"evaluate_every": 2}, "data": {"validation_fraction": 0.0}})
