"""Processes that are killed while they save."""

import os
import subprocess
import sys
from pathlib import Path

import killed_savers
import pytest


@pytest.mark.keeps("process-killed-random-moment")
@pytest.mark.slow  # processes that save to a real disk for a while, and torch in one of their own: half a minute
def test_what_was_saved_is_found_whenever_a_process_is_killed(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, killed_savers.__file__, str(tmp_path / "checkpoints"), "100"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ":".join(map(os.path.abspath, sys.path))},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20  # so many were inside of a save
