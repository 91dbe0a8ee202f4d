"""A signal cuts what can be undone, and lets finish what cannot; the run goes on as if it had not come."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_fits import leave_out_predictions
from test_state import Net, batch, everything, stepper
from tiny_training import Listener, metrics, run, settings
from torch import Tensor, nn

from command_line import tightfit
from quick_trainings import leave_out_pictures
from tightfit.training.api import train
from tightfit.training.checkpoint.files import Files
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.config import Config, TrainingConfig, dump_config
from tightfit.training.interrupt import ENDING, Interrupt, Interrupted
from tightfit.training.loop import run_steps
from tightfit.training.objective import CausalLMLoss
from tightfit.training.reporter import SilentReporter
from tightfit.training.storage import RunFolder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)
    leave_out_predictions(monkeypatch)


class SignalsInside(CausalLMLoss):
    """Sends this process a signal inside a step: in its n-th forward, or in the backward after that."""

    calls = 0
    at, number, in_backward = 0, signal.SIGINT, False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        cls = type(self)
        value = super().__call__(model, batch)
        cls.calls += 1
        if cls.calls == cls.at and not cls.in_backward:
            signal.raise_signal(cls.number)
        if cls.calls == cls.at and cls.in_backward:
            value.register_hook(lambda gradient: signal.raise_signal(cls.number))
        return value


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch):
    def at(call: int, *, number: signal.Signals = signal.SIGINT, in_backward: bool = False) -> None:
        settings = {"calls": 0, "at": call, "number": number, "in_backward": in_backward}
        monkeypatch.setattr("tightfit.training.purpose.CausalLMLoss", type("Signals", (SignalsInside,), settings))

    return at


def interrupted(config: Config) -> dict[str, Any]:
    with pytest.raises(KeyboardInterrupt):
        train(config)
    return json.loads((Path(config.output.folder) / "result.json").read_text())


@pytest.mark.keeps("signal-cuts-step-forward")
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_step_that_is_cut_is_undone_and_made_again_to_the_bit(tmp_path: Path, signals: Any, in_backward: bool):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    sections = {"model": {"dropout": 0.1}, "training": {"gradient_accumulation_steps": 2}}
    run(whole, **sections)
    config = settings(cut, **sections, data={"source": str(whole / "corpus.txt")})

    signals(6, in_backward=in_backward)  # the second micro-batch of the third step
    result = interrupted(config)
    signals(0)
    train(config, resume=True)

    assert (result["steps"], result["interrupted"]) == (2, True)
    assert (cut / "run/model.safetensors").read_bytes() == (whole / "run/model.safetensors").read_bytes()
    assert [line["loss"] for line in metrics(cut)] == [line["loss"] for line in metrics(whole)]


@pytest.mark.keeps("signal-cuts-step-forward")
def test_with_a_step_in_backward_the_backward_that_moves_weights_is_finished(tmp_path: Path, signals: Any):
    training = {"step_in_backward": True, "grad_clip": None}

    signals(2, in_backward=True)
    result = interrupted(settings(tmp_path, training=training))

    assert result["steps"] == 2


@pytest.mark.keeps("signal-cuts-step-forward")
def test_everything_that_a_step_moves_before_its_update_is_put_back(tmp_path: Path):
    made = stepper("adamw")
    interrupt, real = Interrupt(), made.loss
    cut_at = 4

    def loss(model: nn.Module, samples: Any) -> Tensor:
        value = real(model, samples)
        if samples["number"] == cut_at:
            states.append(moving(made.model))
            signal.raise_signal(signal.SIGTERM)
        return value

    def batches():
        for number in range(1, 9):
            if number == cut_at:
                states.append(everything(made))
            samples = batch(number, torch.float32)
            yield {**samples, "input_ids": samples["x"], "labels": torch.zeros(8, 2), "number": number}

    def moving(model: nn.Module) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    states: list[dict[str, Tensor]] = []
    made.loss = loss
    training = TrainingConfig(max_steps=8)
    with interrupt:
        record = run_steps(made, batches(), training, RunFolder(tmp_path), SilentReporter(), interrupt)

    before, inside = states
    assert (record.steps, record.is_whole) == (3, True)
    assert not torch.equal(before["model.norm.running_mean"], inside["norm.running_mean"])
    after = everything(made)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert all(p.grad is None for p in made.model.parameters())


@pytest.mark.keeps("signal-cuts-step-forward")
def test_a_backward_without_python_is_cut_at_the_next_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(200)))
    begun = threading.Event()

    def send() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()

    def work() -> None:
        value = model(torch.ones(512, 256)).sum()
        value.register_hook(lambda gradient: begun.set())
        value.backward()

    with Interrupt() as interrupt, interrupt.heeded_in_backward(model), pytest.raises(Interrupted):
        interrupt.cuttable(work)
    sender.join()

    assert any(p.grad is None for p in model.parameters())


@pytest.mark.keeps("signal-before-first-step")
@pytest.mark.parametrize("number", ENDING)
def test_a_signal_in_the_first_step_leaves_nothing_that_blocks_a_rerun(
    tmp_path: Path, signals: Any, number: signal.Signals
):
    config = tmp_path / "training.yaml"
    config.write_text(dump_config(settings(tmp_path)))

    signals(1, number=number)
    done = tightfit("train", config)

    assert done.code == 128 + number
    assert not (tmp_path / "run").exists()


@pytest.mark.keeps("signal-before-first-step")
@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_a_plan_is_made_ends_with_its_code_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    config = tmp_path / "training.yaml"
    config.write_text(dump_config(settings(tmp_path)))
    monkeypatch.setattr("tightfit.training.preparing.fit", lambda *_: signal.raise_signal(number))

    if number == signal.SIGINT:  # the entry point's handler, which the runner of commands has not
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(settings(tmp_path))
    else:
        assert tightfit("train", config).code == 128 + number
    assert not (tmp_path / "run").exists()


@pytest.mark.keeps("ctrl-c-sigterm-sighup")
@pytest.mark.parametrize("number", ENDING)
def test_each_signal_leaves_a_checkpoint_weights_and_a_result(tmp_path: Path, signals: Any, number: signal.Signals):
    config = tmp_path / "training.yaml"
    config.write_text(dump_config(settings(tmp_path)))

    signals(3, number=number)
    done = tightfit("train", config)

    assert done.code == 128 + number
    assert "end this training with a checkpoint of 1.00 MiB, which takes about" in done.err
    assert [entry.step for entry in Checkpoints(tmp_path / "run" / "checkpoints").listed()] == [2]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["interrupted"]
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.keeps("signal-before-first-step")
def test_a_signal_inside_a_save_lets_it_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = settings(tmp_path, checkpoint={"every_steps": 2})
    real = Files.rename

    def rename(self: Files, source: Path, target: Path) -> None:
        if target.name == "step-00000002":
            signal.raise_signal(signal.SIGINT)
        real(self, source, target)

    monkeypatch.setattr(Files, "rename", rename)
    result = interrupted(config)

    assert result["steps"] == 2
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_intact().checkpoint is not None


@pytest.mark.keeps("signal-before-first-step")
def test_a_second_signal_inside_a_save_ends_at_once_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = settings(tmp_path, checkpoint={"every_steps": 1})
    real = Files.rename

    def rename(self: Files, source: Path, target: Path) -> None:
        if target.name == "step-00000002":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        real(self, source, target)

    monkeypatch.setattr(Files, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()

    assert not (tmp_path / "run" / "result.json").exists()
    found = Checkpoints(tmp_path / "run" / "checkpoints").newest_intact()
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.passed_over) == (1, ())


def test_a_checkpoint_that_finds_no_room_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = Files.write

    def full(self: Files, descriptor: int, content: memoryview) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "step-00000002" in name:
            raise OSError(28, "No space left on device")
        return real(self, descriptor, content)

    monkeypatch.setattr(Files, "write", full)
    listener = Listener()
    result = train(settings(tmp_path, checkpoint={"every_steps": 1, "keep_last": 9}), reporter=listener)

    assert result.steps == 4
    assert any("step 2 has no checkpoint: " in line for name, line in listener.told if name == "note")
    assert [entry.step for entry in Checkpoints(tmp_path / "run" / "checkpoints").listed()] == [1, 3, 4]


def test_the_model_of_the_tests_has_statistics_that_move():
    model = Net()
    before = model.norm.running_mean.clone()
    model(torch.randn(4, model.first.in_features))
    assert not torch.equal(before, model.norm.running_mean)
