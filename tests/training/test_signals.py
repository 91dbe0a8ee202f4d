"""Signals to a training in a process of its own."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from real_trainings import COMMAND, endless, environment, first_step, written
from test_kill import finished
from test_resume import timeless
from tiny_training import settings

from tightfit.devices import present
from tightfit.training.api import train

TOLD = Path(__file__).with_name("told_moments.py")
ALLOWED_SECONDS = 5.0  # from the signal to the end of the process, or what its checkpoint was said to take


@pytest.mark.keeps("ctrl-c-sigterm-sighup")
@pytest.mark.slow  # a training in a process of its own; SIGTERM is in test_kill.py, SIGHUP in test_cut.py
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


@pytest.fixture(scope="module")
def one_thread():
    """This process computes on one thread, as those that it starts: so their bits are the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    present.measure("cpu")  # made-up figures, kept under the number of threads
    yield
    torch.set_num_threads(threads)


SECTIONS = {
    "model": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 128, "dropout": 0.1},
    "data": {"sequence_length": 128, "validation_fraction": 0.5},
    "training": {"max_steps": 4, "batch_size": 16, "evaluate_every": 2},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """The run that no signal reached."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(settings(folder, **SECTIONS))
    return folder


def spent_by(process: psutil.Process) -> float:
    """Seconds of a process's own time, and of the compilers that it runs or has run."""
    seconds = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile: it counts from here on
            seconds += sum(child.cpu_times()[:4])
    return seconds


def told_and_sent(config: Path, moment: str, number: signal.Signals, delay: float) -> tuple[int, str, float]:
    """A training that gets a signal some seconds after a moment: its exit code, its words, and the seconds of its own
    time, on one thread, from the signal to its end: on a quiet machine those of the clock.
    """
    file = config.with_name("told")
    folder = str(config.with_name("compiled"))
    one = environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_CACHE_DIR=folder)
    process = subprocess.Popen(
        [sys.executable, str(TOLD), moment, str(file), str(config)], text=True, stderr=subprocess.PIPE, env=one
    )
    while not file.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(delay)
    spent = spent_by(psutil.Process(process.pid))
    process.send_signal(number)
    assert process.stderr is not None
    with process.stderr as words:
        said = words.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, usage.ru_utime + usage.ru_stime - spent  # of ended compilers too


@pytest.mark.keeps("after-signal-real-process")
@pytest.mark.slow  # six trainings, five of them each in a process of its own
@pytest.mark.parametrize(
    ("moment", "number", "delay"),
    [
        ("step", signal.SIGINT, 0.0),
        ("step", signal.SIGTERM, 0.2),
        ("step", signal.SIGUSR1, 0.4),
        ("evaluation", signal.SIGINT, 0.1),
        ("evaluation", signal.SIGUSR1, 0.0),
    ],
)
def test_after_a_signal_at_any_moment_the_process_is_gone_in_time_and_goes_on_bit_exact(
    tmp_path: Path, uninterrupted: Path, moment: str, number: signal.Signals, delay: float
):
    data = {**SECTIONS["data"], "source": str(uninterrupted / "corpus.txt")}
    config = written(tmp_path, **{**SECTIONS, "data": data})

    code, said, seconds = told_and_sent(config, moment, number, delay)

    predicted = re.search(r"takes about ([0-9.]+) (ms|s|min)", said)
    assert predicted is not None, said
    in_seconds = float(predicted[1]) * {"ms": 0.001, "s": 1, "min": 60}[predicted[2]]
    assert (code, "Traceback" in said) == (128 + number, False)
    assert seconds <= ALLOWED_SECONDS + in_seconds
    finished(tmp_path / "run")
    assert train(str(config), resume=True).resumed_from in (1, 2, 3)
    assert timeless(tmp_path) == timeless(uninterrupted)


@pytest.mark.keeps("after-signal-real-process")
@pytest.mark.slow  # PyTorch's compiler is imported, and compiles C++
@pytest.mark.parametrize(("number", "delay"), [(signal.SIGINT, 0.5), (signal.SIGTERM, 0.0), (signal.SIGUSR1, 1.0)])
def test_a_signal_while_blocks_compile_ends_the_process_in_time_and_blocks_no_rerun(
    tmp_path: Path, one_thread: None, number: signal.Signals, delay: float
):
    config = written(tmp_path, memory={"compile_blocks": True}, training={"max_steps": 1})

    code, said, seconds = told_and_sent(config, "compiling", number, delay)

    assert (code, "Traceback" in said) == (128 + number, False)
    assert seconds <= ALLOWED_SECONDS
    assert not (tmp_path / "run").exists()
