"""A whole run whose memory runs out: its files, its outcome, and what a resumed one knows of it."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import Listener, metrics, settings

from injected_out_of_memory import OutOfMemoryAt
from tightfit.errors import CannotFit
from tightfit.training.api import train
from tightfit.training.recovering import StepPlanner

NUMBER = 150  # of the operators of a step, in the middle of it


class Failing(Listener):
    """Memory runs out in one step."""

    def __init__(self, step, error_at=NUMBER):
        super().__init__()
        self.step, self.mode = step, OutOfMemoryAt(error_at)

    def on_start(self, start):
        super().on_start(start)
        if self.step == 1:
            self.mode.__enter__()

    def on_step(self, step):
        super().on_step(step)
        if step.step == self.step - 1:
            self.mode.__enter__()
        elif step.step == self.step:
            self.mode.__exit__(None, None, None)

    def notes(self):
        return [line for kind, line in self.told if kind == "note" and "out of memory" in line]


def weights(folder):
    return load_file(folder / "run" / "model.safetensors")


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """They take most of the time of a run as small as these."""
    monkeypatch.setattr("tightfit.training.files.write_pictures", lambda *drawn: None)


EXACT = {"memory": {"levers": "exact"}, "training": {"max_steps": 4, "batch_size": 8, "device": "cpu"}}


@pytest.mark.keeps("within-rounding-tighter-plan", "resumed-run-begins-plan")
def test_a_recovered_run_is_the_uninterrupted_one_and_a_resumed_one_keeps_its_plan(tmp_path):
    """Weights, losses, norms and learning rates: the plan that took over recomputes, which changes no bit."""
    plain, failing = tmp_path / "plain", tmp_path / "failing"
    plain.mkdir()
    failing.mkdir()
    train(settings(plain, **EXACT))
    config, listener = settings(failing, **EXACT, checkpoint={"every_steps": 1}), Failing(3)
    result = train(config, reporter=listener)
    assert listener.mode.raised == 1
    assert [line.split(":")[0] for line in listener.notes()] == ["step 3"]
    assert result.predicted_peak_bytes < result.plain_peak_bytes, "the plan that took over"
    same = ("step", "loss", "learning_rate", "grad_norm", "tokens")
    assert [[line[key] for key in same] for line in metrics(failing)] == [
        [line[key] for key in same] for line in metrics(plain)
    ]
    assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(failing).items())

    later = Listener()
    train(config, ["training.max_steps=5"], reporter=later, resume=True)
    assert dict(later.told)["start"].predicted_peak_bytes == result.predicted_peak_bytes


@pytest.mark.keeps("tighter-plan-left-step")
@pytest.mark.slow  # a whole training
def test_where_nothing_is_tighter_the_steps_before_are_in_a_checkpoint(tmp_path, monkeypatch):
    plain, failing = tmp_path / "plain", tmp_path / "failing"
    plain.mkdir()
    failing.mkdir()
    train(settings(plain, **EXACT))

    def nothing_fits(*args, **options):
        raise CannotFit("nothing fits", least_bytes=10**12)

    config, listener = settings(failing, **EXACT), Failing(3)
    with monkeypatch.context() as patch:
        patch.setattr(StepPlanner, "within", nothing_fits)
        with pytest.raises(CannotFit, match="step 3: out of memory"):
            train(config, reporter=listener)
    listener.mode.__exit__(None, None, None)
    assert [path.name for path in (failing / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert ("note", "step 2 is in a checkpoint: go on with --resume and other memory.*") in listener.told
    train(config, resume=True)
    assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(failing).items())


def test_without_recovery_the_run_ends_with_the_error(tmp_path):
    listener = Failing(1)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        train(settings(tmp_path, memory={"recover": False}), reporter=listener)
    listener.mode.__exit__(None, None, None)
