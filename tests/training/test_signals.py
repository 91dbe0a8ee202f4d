"""Signals to a training in a process of its own."""

import contextlib
import json
import os
import pty
import signal
import sys
from pathlib import Path

from real_trainings import COMMAND, begun, endless, environment, first_step

from tightfit.checkpoint.store import Checkpoints
from tightfit.models.saving import load_model
from tightfit.training.lock import LOCK


def finished(run: Path) -> dict:
    """What a training that was ended early left: a whole run."""
    load_model(run)
    assert not (run / LOCK).exists()
    result = json.loads((run / "result.json").read_text())
    assert result["interrupted"]
    checkpoint = Checkpoints(run / "checkpoints").newest_intact().checkpoint
    assert checkpoint is not None
    assert checkpoint.step == result["steps"]
    return result


def test_sigterm_keeps_what_is_done(tmp_path: Path):
    training = begun(endless(tmp_path), tmp_path / "run")

    training.send_signal(signal.SIGTERM)
    out, err = training.communicate()

    assert training.returncode == 128 + signal.SIGTERM
    assert "peak memory" in out
    assert "Traceback" not in err
    finished(tmp_path / "run")


def test_a_terminal_that_is_closed_ends_a_training_like_ctrl_c(tmp_path: Path):
    config = endless(tmp_path)
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [*COMMAND, str(config)], environment())
    with contextlib.suppress(OSError):  # EIO: the process has ended
        first_step(tmp_path / "run", lambda: os.read(terminal, 1 << 16))
    os.close(terminal)

    _, status = os.waitpid(process, 0)

    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    finished(tmp_path / "run")
