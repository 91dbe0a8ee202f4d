"""What a long answer says while it lasts, on a terminal and off it."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import termios
import threading
import time

import pytest

from command_line import tightfit
from tightfit.cli.waiting import CLEAR, Waiting


class Terminal(io.StringIO):
    """Text that is written to a terminal of 40 columns."""

    def __init__(self):
        super().__init__()
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))

    def isatty(self):
        return True

    def fileno(self):
        return self.theirs

    @property
    def shown(self):
        text = ""
        while select.select([self.ours], [], [], 0.2)[0]:  # it comes in pieces
            text += os.read(self.ours, 10_000).decode()
        return text


def ring():
    os.kill(os.getpid(), signal.SIGALRM)


def test_a_log_has_a_line_when_nothing_was_said_for_a_while_and_none_for_each_step():
    log = io.StringIO()
    with Waiting(log, quiet=1000.0) as waiting:
        for number in range(50):
            waiting(f"recipe {number}")
        assert log.getvalue() == ""
        ring()
        assert log.getvalue() == "0 s: recipe 49\n"


@pytest.mark.keeps("command-runs-steps-dry")
def test_a_step_that_says_nothing_itself_has_a_sign_of_life():
    log = io.StringIO()
    with Waiting(log, quiet=0.02):
        ends = time.monotonic() + 10
        while not log.getvalue() and time.monotonic() < ends:
            sum(range(1000))
    assert log.getvalue().startswith("0 s: at work\n")


def test_a_terminal_has_one_line_that_changes_and_is_taken_away():
    terminal = Terminal()
    with Waiting(terminal) as waiting:
        waiting("the first")
        waiting("the second, which is longer than the terminal is wide")
    first, second, gone = terminal.shown.split(CLEAR)[1:]
    assert (first, gone) == ("0 s: the first", "")
    assert second == "0 s: the second, which is longer than the terminal"[:39]


def test_signals_are_as_they_were_behind_it_and_a_thread_that_has_none_writes_at_its_calls():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ValueError, match="no"), Waiting(io.StringIO()):
        raise ValueError("no")
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    log = io.StringIO()

    def work():
        with Waiting(log, quiet=0.0) as waiting:
            waiting("a step")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert log.getvalue() == "0 s: a step\n"


@pytest.mark.sampled(1)
@pytest.mark.keeps("command-runs-steps-dry")
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--budget", "0.9x"),
        ("estimate",),
        pytest.param(("plan", "--budget", "1KiB"), marks=pytest.mark.slow),  # ways out and recipes: many dry runs
        pytest.param(("fit", "--device", "cpu"), marks=pytest.mark.slow),
    ],
)
def test_a_command_that_runs_steps_dry_says_what_it_does_where_that_takes_long(arguments, monkeypatch):
    monkeypatch.setattr(Waiting.__init__, "__defaults__", (None, 0.0))
    outcome = tightfit(*arguments, "--model", "models_by_name:decoder", "--seq-len", 16)
    lines = [line for line in outcome.err.splitlines() if re.match(r"\d+ s: ", line)]
    assert lines
    assert all(line.partition(": ")[2] for line in lines)
    if arguments[-1] == "1KiB":
        assert any("looking for ways out" in line for line in lines)
