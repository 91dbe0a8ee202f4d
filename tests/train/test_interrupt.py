import json
import os
import signal
from pathlib import Path

import pytest
from tiny_training import Listener, settings

from tightfit.models.saving import load_model
from tightfit.train import StepMetrics, train
from tightfit.train.interrupt import Interrupt


class PressesCtrlC(Listener):
    """Sends this process a real SIGINT after the second step."""

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_what_is_done_and_then_interrupts(tmp_path: Path):
    listener = PressesCtrlC()

    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, training={"max_steps": 50}), reporter=listener)

    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["interrupted"], result["steps"]) == (True, 2)
    assert listener.told[-1][0] == "end"
    load_model(tmp_path / "run")


def test_a_second_ctrl_c_interrupts_at_once():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)  # to this thread: os.kill may pick another
        assert interrupt.received
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # to this thread: os.kill may pick another


def test_the_users_own_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)

    with Interrupt():
        assert signal.getsignal(signal.SIGINT) != before

    assert signal.getsignal(signal.SIGINT) == before
