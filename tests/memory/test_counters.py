"""What the system counts for this process."""

import subprocess
import sys

import pytest

LARGE = 3 * 2**30 // 2  # above what the imports take


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process begins with a peak of its own")
@pytest.mark.slow  # an interpreter of its own, and 1.5 GiB
def test_a_process_does_not_count_the_peak_of_the_one_that_started_it():
    child = "from tightfit.memory.counters import highest_rss; print(highest_rss())"
    parent = f"import subprocess, sys; held = b'.' * {LARGE}; subprocess.run([sys.executable, '-c', {child!r}])"
    told = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 0 < int(told.stdout) < LARGE
