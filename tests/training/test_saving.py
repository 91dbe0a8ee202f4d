"""Checkpoints beside the training: what their copy takes is predicted, measured, and inside the budget."""

import threading
from pathlib import Path
from typing import Any

import pytest
from made_up_fits import leave_out_predictions
from test_state import stepper, trained
from tiny_training import run, settings

from quick_trainings import leave_out_pictures
from tightfit.errors import CannotFit
from tightfit.memory.allocator import cpu_rise
from tightfit.training.api import train
from tightfit.training.checkpoint.background import BackgroundSaver
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.tensors import copy_bytes

BACKGROUND = {"every_steps": 1, "in_background": True}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)


@pytest.mark.keeps("loading-checkpoint-takes-bytes")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", [{}, {"budget": "0.9x", "levers": "exact"}], ids=["plain", "planned"])
def test_the_copy_of_a_background_save_is_in_the_predicted_peak_and_in_the_budget(
    tmp_path: Path, memory: dict[str, Any]
):
    result = run(tmp_path, memory=memory, checkpoint=BACKGROUND)

    assert result.measured_peak_bytes == pytest.approx(result.predicted_peak_bytes, rel=1e-3)
    if memory:
        assert result.budget_bytes == int(0.9 * result.plain_peak_bytes)
        assert result.measured_peak_bytes <= result.budget_bytes
    else:
        assert result.predicted_peak_bytes > result.plain_peak_bytes
    assert [entry.step for entry in Checkpoints(tmp_path / "run" / "checkpoints").listed()] == [3, 4]


def test_a_budget_that_the_copy_takes_alone_is_refused_with_the_key(tmp_path: Path):
    with pytest.raises(CannotFit, match=r"checkpoint.in_background copies .*set it to false"):
        train(settings(tmp_path, memory={"budget": "100KB"}, checkpoint=BACKGROUND))


@pytest.mark.keeps("loading-checkpoint-takes-bytes")
def test_saving_takes_no_memory_and_saving_in_the_background_the_predicted_copy(tmp_path: Path):
    made = stepper("adamw")
    trained(made, 1, 1)
    state = made.state.capture()
    checkpoints = Checkpoints(tmp_path)

    assert cpu_rise(lambda: checkpoints.save(1, state.tensors, state.record)) == 0
    with BackgroundSaver(checkpoints) as saver:
        assert cpu_rise(lambda: saver.save(2, state.tensors, state.record)) == pytest.approx(
            copy_bytes(state.tensors), rel=1e-3
        )
        assert cpu_rise(lambda: saver.save(3, state.tensors, state.record)) == 0  # the copies stay


def test_a_training_goes_on_while_a_checkpoint_is_written_and_writes_what_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leave_out_predictions(monkeypatch)
    in_front, beside = tmp_path / "in_front", tmp_path / "beside"
    for folder in (in_front, beside):
        folder.mkdir()
    run(in_front, checkpoint={"every_steps": 2})
    threads = []
    real = Checkpoints.save

    def save(self: Checkpoints, *arguments: Any) -> Path:
        threads.append(threading.current_thread())
        return real(self, *arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    run(beside, checkpoint={"every_steps": 2, "in_background": True}, data={"source": str(in_front / "corpus.txt")})

    assert threading.main_thread() not in threads
    for step in (2, 4):
        one, other = (Checkpoints(folder / "run" / "checkpoints").listed() for folder in (in_front, beside))
        first, second = (next(e.checkpoint for e in found if e.step == step) for found in (one, other))
        assert first is not None
        assert second is not None
        assert first.digests == second.digests
