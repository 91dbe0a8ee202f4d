"""`tightfit train` on CUDA's path: the bits of the plain run with streamed blocks, and the peak of steps alone."""

import json

import pytest
import torch
from test_streamed_training import SECTIONS, STREAMED, Half, assert_same_bits
from tiny_training import metrics, settings

import tightfit
from quick_trainings import leave_out_pictures
from tightfit.planner.levers import Stream
from tightfit.planner.request import Request
from tightfit.training.api import train
from tightfit.training.fitting import LeversInForce
from tightfit.training.slowdown import STEPS, TimedStep

pytestmark = pytest.mark.usefixtures("values")
ON_CARD = {
    **SECTIONS,
    "model": {**SECTIONS["model"], "num_layers": 6, "hidden_size": 256},  # beside cuBLAS's workspaces of 16 MiB
    "training": {**SECTIONS["training"], "device": "cuda"},
}


@pytest.mark.sampled(1)
@pytest.mark.keeps("streamed-trained-bits")
@pytest.mark.parametrize("is_file", [False, True])
def test_a_training_that_streams_has_the_bits_of_the_plain_one_and_is_resumed(is_file, tmp_path, monkeypatch):
    """In a file, as where the host has no room for the weights."""
    leave_out_pictures(monkeypatch)
    if is_file:
        monkeypatch.setattr(Request, "stream_folder", str(tmp_path))
    plain, other = tmp_path / "plain", tmp_path / "streamed"
    plain.mkdir(), other.mkdir()
    train(settings(plain, **ON_CARD))
    memory = {**STREAMED, "budget": "0.7x"}
    config = settings(other, **ON_CARD, data={"source": str(plain / "corpus.txt")}, memory=memory)
    with pytest.raises(KeyboardInterrupt):
        train(config, reporter=Half())
    assert len(metrics(other)) == 2
    assert train(config, resume=True).steps == 4
    assert_same_bits(plain, other)
    lever = tightfit.Plan.from_dict(json.loads((other / "run" / "plan.json").read_text())).lever(Stream)
    assert lever is not None
    assert lever.trained
    result = json.loads((other / "run" / "result.json").read_text())
    before = json.loads((plain / "run" / "result.json").read_text())
    beside = before["measured_peak_bytes"] - before["predicted_peak_bytes"]  # a number of the loop's own
    assert result["measured_peak_bytes"] == result["predicted_peak_bytes"] + beside
    assert result["predicted_peak_bytes"] <= result["budget_bytes"]
    assert 0 <= beside <= 512
    assert sum(result["host_by_category"].values()) == result["host_peak_bytes"]
    in_memory = result["host_by_category"].get("parameters", 0)
    assert in_memory == 0 if is_file else in_memory >= lever.bytes
    assert lever.folder == (str(tmp_path) if is_file else None)
    assert result["measured_host_peak_bytes"] > 0


@pytest.mark.keeps("streamed-trained-bits")
def test_weights_that_stream_are_never_on_the_card_together(tmp_path, monkeypatch):
    """The card has less memory than the weights, as a plan that streams them allows."""
    leave_out_pictures(monkeypatch)
    before = []
    enter = LeversInForce.__enter__

    def entered(levers):
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()  # workspaces of cuBLAS
        before.append(sum(weight.nbytes for weight in levers._model.parameters() if weight.is_cuda))
        entered = enter(levers)
        before.append(torch.cuda.max_memory_allocated() - there)
        return entered

    monkeypatch.setattr(LeversInForce, "__enter__", entered)
    train(settings(tmp_path, **ON_CARD, memory={**STREAMED, "budget": "0.7x"}))
    lever = tightfit.Plan.from_dict(json.loads((tmp_path / "run" / "plan.json").read_text())).lever(Stream)
    assert lever is not None
    assert before[0] == 0
    assert before[1] < lever.bytes


def test_a_look_at_the_pace_is_no_part_of_the_next_steps_peak(tmp_path, monkeypatch):
    """Parts of the plain step and of looser plans are timed in the middle of the training, on the same card."""
    leave_out_pictures(monkeypatch)
    looks = []

    def plain_seconds(timed, part):
        looks.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda").nbytes)
        return 1e-6

    monkeypatch.setattr(TimedStep, "part_that_fits", lambda timed, batch: batch)
    monkeypatch.setattr(TimedStep, "plain_seconds", plain_seconds)
    config = settings(
        tmp_path,
        training={"device": "cuda", "max_steps": STEPS + 4},
        memory={"budget": "1.0x", "levers": "exact", "max_slowdown": 0.001},
    )
    result = train(config)
    assert looks
    assert result.measured_peak_bytes < 1.01 * result.predicted_peak_bytes < looks[0]
