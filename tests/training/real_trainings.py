"""Trainings of a user, each in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from tiny_training import settings

from tightfit.devices.cache import cache_folder

COMMAND = (sys.executable, "-c", "from tightfit.cli import main; main()", "train")
STEPS = 100_000  # more than any test waits for


def written(folder: Path, **sections: dict[str, Any]) -> Path:
    """The YAML file of a tiny training that writes to `folder`/run."""
    path = folder / "training.yaml"
    path.write_text(yaml.safe_dump(settings(folder, **sections).model_dump(mode="json")))
    return path


def endless(folder: Path, **sections: dict[str, Any]) -> Path:
    """One that goes on until it is ended."""
    training = {"max_steps": STEPS, "log_every": 1, **sections.pop("training", {})}
    return written(folder, training=training, **sections)


def begun(config: Path, run: Path, *before: str) -> subprocess.Popen[str]:
    """A training that has made its first step, behind the words of another command."""
    process = subprocess.Popen(
        [*before, *COMMAND, str(config)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )

    def alive() -> None:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)

    first_step(run, alive)
    return process


def first_step(run: Path, wait: Callable[[], object]) -> None:
    """Wait, a little at a time, until a training has made its first step."""
    while not (run / "metrics.jsonl").is_file():
        wait()


def environment(**variables: str) -> dict[str, str]:
    """This process's own, and what it knows of the machine."""
    ours = {"PYTHONPATH": os.pathsep.join(sys.path), "TIGHTFIT_CACHE": str(cache_folder())}
    return {**os.environ, **ours, **variables}
