import json
import os
import signal
from pathlib import Path

import pytest
from made_up_fits import leave_out_predictions
from tiny_training import Listener, settings

from quick_trainings import leave_out_pictures
from tightfit.models.saving import load_model
from tightfit.training.api import train
from tightfit.training.interrupt import ENDING, Interrupt
from tightfit.training.result import StepMetrics


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)
    leave_out_predictions(monkeypatch)


class PressesCtrlC(Listener):
    """Sends this process a real SIGINT after the second step."""

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.keeps("ctrl-c-sigterm-sighup")
def test_ctrl_c_keeps_what_is_done_and_then_interrupts(tmp_path: Path):
    listener = PressesCtrlC()

    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, training={"max_steps": 50}), reporter=listener)

    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["interrupted"], result["steps"]) == (True, 2)
    assert listener.told[-1][0] == "end"
    load_model(tmp_path / "run")


@pytest.mark.keeps("ctrl-c-sigterm-sighup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_processes_is_finished_first_and_then_delivered(tmp_path: Path, number: signal.Signals):
    received = []
    before = signal.signal(number, lambda signum, frame: received.append(signum))

    class Sends(Listener):
        def on_step(self, metrics: StepMetrics) -> None:
            super().on_step(metrics)
            if metrics.step == 2:
                signal.raise_signal(number)
                assert received == []

    try:
        result = train(settings(tmp_path, training={"max_steps": 50}), reporter=Sends())
    finally:
        signal.signal(number, before)

    assert received == [number]
    assert (result.interrupted, result.steps) == (True, 2)
    load_model(tmp_path / "run")


def test_a_signal_during_the_evaluation_leaves_it_out_and_keeps_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def share(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("tightfit.training.evaluation._share", share)
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path))

    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["interrupted"], result["steps"], result["validation_loss"]) == (True, 4, None)
    load_model(tmp_path / "run")


def test_a_second_ctrl_c_interrupts_at_once():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)  # to this thread: os.kill may pick another
        assert interrupt.received
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # to this thread: os.kill may pick another


@pytest.mark.parametrize("number", ENDING)
def test_the_users_own_handler_is_put_back(number: signal.Signals):
    before = signal.getsignal(number)

    with Interrupt():
        assert signal.getsignal(number) != before

    assert signal.getsignal(number) == before


@pytest.mark.keeps("ctrl-c-sigterm-sighup")
def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)

    assert interrupt.received is None
