"""What somebody made to do harm is refused in one line, and nothing in it is run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import malicious
import pytest


def in_a_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    paths = ":".join([str(Path(malicious.__file__).parent), *map(os.path.abspath, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments, str(folder)], capture_output=True, text=True, cwd=folder, timeout=120,
        env={"PYTHONPATH": paths},
    )  # fmt: skip


@pytest.mark.keeps("hundred-malicious-checkpoints-refused")
def test_each_is_refused_in_one_line_without_running_anything(scratch: Path):
    """In a process with little memory, without torch, that reports what Python runs and opens."""
    done = in_a_process(scratch, malicious.__file__)

    assert done.returncode == 0, done.stderr
    opened = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["name"] for each in opened] == list(malicious.MADE)
    assert len(opened) >= 60
    for each in opened:
        assert each["error"] == "", each
        (line,) = each["lines"]
        assert line.isprintable(), each
        assert len(line) < 300, each
        assert each["watched"] == [], each
    assert not (scratch / "executed").exists()


NOTICED = """
import pathlib, pickle, sys, malicious
from tightfit.training.checkpoint import find
whole = find.newest_intact
find.newest_intact = lambda folder: whole(folder) if folder.name == "honest" else pickle.loads(malicious.PICKLE)
malicious.MADE = {"one": lambda folder: None}
malicious.main(pathlib.Path(sys.argv[1]))
"""


@pytest.mark.keeps("hundred-malicious-checkpoints-refused")
def test_the_process_notices_what_is_run(scratch: Path):
    """The test above can fail: loading one of the pickles is noticed."""
    done = in_a_process(scratch, "-c", NOTICED)

    assert done.returncode == 0, done.stderr
    assert any("os.system" in event for event in json.loads(done.stdout)["watched"])
