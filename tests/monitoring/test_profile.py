"""`tightfit profile` around a real script, as a user starts it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from command_line import tightfit
from tightfit.training.monitoring.record import Record

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


# Runs the script with some options, alone or under `tightfit profile`, each time in a fork of an interpreter that has
# imported torch: an interpreter of its own spends most of its time on that.
STARTER = """
import json, os, runpy, sys
import torch, torch._dynamo

script, runs = json.loads(sys.argv[1])
codes = []
for way, options, folder in runs:
    child = os.fork()
    if child:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    os.chdir(folder)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)
    if way == "profiled":
        from tightfit.cli import main

        sys.argv = ["tightfit", "profile", script, *options]
        main()
    else:
        sys.path[0], sys.argv = os.path.dirname(script), [script, *options]
        runpy.run_path(script, run_name="__main__")
    sys.exit()
print(json.dumps(codes))
"""
ENDINGS = [("plain", "exit"), ("plain", "interrupt")] + [
    ("profiled", end) for end in ("exit", "interrupt", "memory", "untrained")
]


def in_forks(tmp_path_factory, runs):
    """How the script ended, by the way it ran and its options."""
    folders = [tmp_path_factory.mktemp("run") for _ in runs]
    asked = [str(SCRIPT), [[*run, str(folder)] for run, folder in zip(runs, folders, strict=True)]]
    started = ended(folders[0], "-c", STARTER, json.dumps(asked))
    assert started.code == 0, started.err
    return [
        Ended(code, (folder / "out").read_text(), (folder / "err").read_text(), folder)
        for code, folder in zip(json.loads(started.out), folders, strict=True)
    ]


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """How the script ended, by the way it ran and the ending that it was given."""
    runs = in_forks(tmp_path_factory, [(way, ("--end", end)) for way, end in ENDINGS])
    return dict(zip(ENDINGS, runs, strict=True))


@pytest.fixture(scope="module")
def alone_and_done(tmp_path_factory):
    return in_forks(tmp_path_factory, [(way, ("--steps", "3", "--debug")) for way in ("plain", "profiled")])


@pytest.fixture
def done(alone_and_done):
    return alone_and_done[1]


@pytest.mark.keeps("script-profile-prints-fails")
def test_the_script_computes_and_prints_the_same(alone_and_done):
    alone, done = alone_and_done
    assert done.out == alone.out
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


@pytest.mark.keeps("script-profile-prints-fails")
@pytest.mark.slow  # two interpreters of its own
def test_a_script_that_raises_ends_as_it_would_have(tmp_path):
    done, alone = profiled(tmp_path, "--end", "raise"), plain(tmp_path, "--end", "raise")
    assert done.code == alone.code == 1
    assert done.out == alone.out
    assert done.record.steps == 2
    assert done.err.endswith(alone.err)  # the traceback, from the script's own line on
    assert done.record.failure.message == "bad luck"


@pytest.mark.keeps("script-profile-prints-fails")
@pytest.mark.slow  # six runs of a script
@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("interrupt", 128 + 15)])
def test_a_script_that_ends_early_ends_as_it_would_have(end, code, forked):
    done, alone = forked["profiled", end], forked["plain", end]
    assert done.code == alone.code == code
    assert done.out == alone.out
    assert done.record.steps == 2
    assert done.record.failure is None
    assert "Traceback" not in done.err


@pytest.mark.slow  # six runs of a script
def test_a_script_that_runs_out_of_memory_leaves_what_a_doctor_needs(forked):
    done = forked["profiled", "memory"]
    assert done.code == 1
    failure = done.record.failure
    assert failure.out_of_memory.requested_bytes == 4 * 10**15
    assert done.record.traced_step == 2


@pytest.mark.slow  # six runs of a script
def test_a_script_that_trains_nothing_says_so(forked):
    done = forked["profiled", "untrained"]
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
    told = tightfit("profile", sys.executable, tmp_path / "none.py")
    assert told.code == 2
    assert "a program, and no Python script" in told.error
    assert "is a folder: name a file" in tightfit("profile", "--output", tmp_path, SCRIPT).error
    outcome = tightfit("profile", "--output", tmp_path / "none" / "record.json", SCRIPT)
    assert (outcome.code, outcome.out) == (2, "")
    assert "is not there or cannot be written" in outcome.error
