"""Commands under torchrun, on several null cards of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent


def begun_ranks(ranks, *command, folder, **setting):
    """A command that has ended, whatever its end."""
    outside = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "TIGHTFIT_NULLCARD")}
    paths = [TESTS.parent / "src", TESTS, TESTS / "integrations", TESTS / "training", TESTS / "ranks", HERE]
    outside |= {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1", **setting}
    words = [sys.executable, "-m", "tightfit.devices.nullcard", "rtx4090", "--count", str(ranks), "--", sys.executable]
    words += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *command]
    return subprocess.run(words, cwd=folder, env=outside, capture_output=True, text=True, timeout=500)


def run_ranks(ranks, *command, folder, **setting):
    """The lines of JSON that a command prints, which ends well."""
    ran = begun_ranks(ranks, *command, folder=folder, **setting)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"')]
