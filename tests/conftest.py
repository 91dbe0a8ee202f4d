"""For all tests."""

import os

# Kineto reads this when the first profile of a process starts, and writes lines for all later ones: whichever test
# profiles first decides.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

# Test processes side by side share the cores: threads that wait for a core that another process has only burn time.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _PROCESSES > 1:
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _PROCESSES))
