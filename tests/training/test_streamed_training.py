"""Whole trainings whose plan streams blocks: the bits of the plain run, cut by signals and resumed too."""

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_training import Listener, metrics, run, settings

import tightfit
from quick_trainings import leave_out_pictures
from tightfit.levers.stream.tiers import FileTier
from tightfit.planner.levers import Stream
from tightfit.runtime.internals import backward_is_running
from tightfit.training.api import train
from tightfit.training.result import StepMetrics

STREAMED = {"budget": "0.6x", "levers": ["exact", "stream"]}
SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 4, "hidden_size": 64, "dropout": 0.1},
    "training": {"optimizer": "offloaded_adamw", "batch_size": 2, "max_steps": 4, "gradient_accumulation_steps": 2},
    "checkpoint": {"every_steps": 2},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory):
    """The run that streams nothing."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        run(folder, **SECTIONS)
    return folder


def in_same_data(plain: Path, folder: Path, **sections: Any) -> Any:
    return settings(folder, **{**SECTIONS, "data": {"source": str(plain / "corpus.txt")}, **sections})


def assert_same_bits(one: Path, other: Path) -> None:
    keys = ("step", "loss", "gradient_norm", "validation_loss")
    left, right = ([[line.get(key) for key in keys] for line in metrics(folder)] for folder in (one, other))
    assert left == right
    left, right = (load_file(folder / "run" / "model.safetensors") for folder in (one, other))
    assert left.keys() == right.keys()
    assert all((left[name] == right[name]).all() for name in left)


@pytest.mark.keeps("streamed-trained-bits")
def test_a_training_that_streams_has_the_bits_of_the_plain_one(plain: Path, tmp_path: Path):
    train(in_same_data(plain, tmp_path, memory=STREAMED))
    assert_same_bits(plain, tmp_path)
    lever = tightfit.Plan.from_dict(json.loads((tmp_path / "run" / "plan.json").read_text())).lever(Stream)
    assert lever is not None
    assert lever.trained
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert sum(result["host_by_category"].values()) == result["host_peak_bytes"]
    assert result["measured_host_peak_bytes"] > 0
    before = json.loads((plain / "run" / "result.json").read_text())
    beside = before["measured_peak_bytes"] - before["predicted_peak_bytes"]  # a number of the loop's own
    assert result["measured_peak_bytes"] == result["predicted_peak_bytes"] + beside
    assert result["predicted_peak_bytes"] <= result["budget_bytes"]
    assert result["measured_peak_bytes"] <= 0.6 * before["measured_peak_bytes"]


@pytest.mark.sampled(1)
@pytest.mark.keeps("streamed-trained-bits")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_blocks_travel_ends_with_a_checkpoint_that_is_resumed(number, plain, tmp_path, monkeypatch):
    """Ctrl-C in a forward, SIGTERM in a backward."""
    moved, told, received, cut = FileTier.bring, Listener(), [], []
    before = signal.signal(number, lambda *_: received.append(number))

    def bring(*arguments: Any) -> Any:
        if ("step", 1) in told.told and not cut and backward_is_running() == (number == signal.SIGTERM):
            cut.append(number)
            signal.raise_signal(number)
        return moved(*arguments)

    config = in_same_data(plain, tmp_path, memory=STREAMED)
    with monkeypatch.context() as patch:
        patch.setattr(FileTier, "bring", bring)
        with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext():
            train(config, reporter=told)
    signal.signal(number, before)
    assert cut
    assert len(received) == (number == signal.SIGTERM)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["interrupted"]
    assert 0 < result["steps"] < 4
    assert train(config, resume=True).steps == 4
    assert_same_bits(plain, tmp_path)


class Half(Listener):
    """Ctrl-C after the second step."""

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == 2:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow  # two plans and trainings each
@pytest.mark.keeps("streamed-trained-bits")
@pytest.mark.parametrize("first", [{}, STREAMED], ids=["plain first", "streamed first"])
def test_a_checkpoint_of_either_kind_is_resumed_by_the_other(first, plain: Path, tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        train(in_same_data(plain, tmp_path, memory=first), reporter=Half())
    assert len(metrics(tmp_path)) == 2
    then = {} if first else STREAMED
    assert train(in_same_data(plain, tmp_path, memory=then), resume=True).steps == 4
    assert_same_bits(plain, tmp_path)
