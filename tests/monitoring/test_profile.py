"""`tightfit profile` around a real script, as a user starts it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from command_line import tightfit
from tightfit.monitoring.record import Record

SCRIPT = Path(__file__).parent / "training_script.py"


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    folder: Path

    @property
    def record(self):
        return Record.from_json(self.folder / "training_script-memory.json")


def ended(folder, *command):
    environment = {**os.environ, "MPLBACKEND": "agg", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    return Ended(done.returncode, done.stdout, done.stderr, folder)


def plain(folder, *arguments):
    return ended(folder, str(SCRIPT), *arguments)


def profiled(folder, *arguments):
    return ended(folder, "-c", "from tightfit.cli import main; main()", "profile", str(SCRIPT), *arguments)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return profiled(tmp_path_factory.mktemp("done"), "--steps", "3", "--debug")


def test_the_script_computes_and_prints_the_same(done, tmp_path):
    assert done.out == plain(tmp_path, "--steps", "3", "--debug").out
    assert "__main__ ['--steps', '3', '--debug'] True" in done.out
    assert done.code == 0


def test_model_optimizer_and_steps_are_found(done):
    record = done.record
    assert (record.model, record.optimizer, record.steps, record.traced_step) == ("GPT", "AdamW", 3, 2)
    assert record.peak_source == "traced step"
    assert record.by_category["gradients"] > 0  # of the first micro-batch
    assert record.by_module["h.1.up"] > 0
    assert sum(record.by_category.values()) == record.peak_bytes


def test_the_summary_is_on_stderr_and_the_picture_beside_the_record(done):
    assert "Peak " in done.err
    assert "Written: training_script-memory.json" in done.err
    assert (done.folder / "training_script-memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("end", "code"), [("raise", 1), ("exit", 3), ("interrupt", 128 + 15)])
def test_a_script_that_ends_early_ends_as_it_would_have(end, code, tmp_path):
    done, alone = profiled(tmp_path, "--end", end), plain(tmp_path, "--end", end)
    assert done.code == alone.code == code
    assert done.out == alone.out
    assert done.record.steps == 2
    if end == "raise":
        assert done.err.endswith(alone.err)  # the traceback, from the script's own line on
        assert done.record.failure.message == "bad luck"
    else:
        assert done.record.failure is None
        assert "Traceback" not in done.err


def test_a_script_that_runs_out_of_memory_leaves_what_a_doctor_needs(tmp_path):
    done = profiled(tmp_path, "--end", "memory")
    assert done.code == 1
    failure = done.record.failure
    assert failure.out_of_memory.requested_bytes == 4 * 10**15
    assert done.record.traced_step == 2


def test_a_script_that_trains_nothing_says_so(tmp_path):
    done = profiled(tmp_path, "--end", "untrained")
    assert done.code == 0
    assert done.record.model == ""
    assert "No model was called with gradients: nothing was watched." in done.err
    assert "Peak" not in done.err


def test_the_record_goes_where_it_is_told(tmp_path):
    outcome = tightfit("profile", "--output", tmp_path / "here.json", "--step", 1, SCRIPT, "--steps", 1)
    assert outcome.code == 0
    assert json.loads((tmp_path / "here.json").read_text())["traced_step"] == 1


def test_what_is_no_script_or_no_folder_is_told_before_anything_runs(tmp_path):
    assert "no such script" in tightfit("profile", tmp_path / "none.py").error
    assert "is a folder: name a file" in tightfit("profile", "--output", tmp_path, SCRIPT).error
    outcome = tightfit("profile", "--output", tmp_path / "none" / "record.json", SCRIPT)
    assert (outcome.code, outcome.out) == (2, "")
    assert "is not there or cannot be written" in outcome.error
