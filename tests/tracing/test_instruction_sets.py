"""Scratch memory of CPU operators is predicted under every instruction set and number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [Path(__file__).with_name(name) for name in ("test_workspace.py", "test_recurrent.py")]
SETS = ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "ALL")  # oneDNN takes the machine's own where it has less


@pytest.mark.slow  # the tests of scratch memory once more, each in a process of its own: oneDNN reads it once
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("instructions", SETS)
def test_scratch_memory_is_predicted(instructions, threads):
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    variables = {**own, "ONEDNN_MAX_CPU_ISA": instructions, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *map(str, TESTS)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:]
