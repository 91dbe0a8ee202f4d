"""The protocol of a tracker, and the run that it writes to."""

import importlib.util
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tightfit.errors import ConfigError

INSTALL_HINT = "pip install 'tightfit[track]'"
PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}  # by the name in output.track
FOLDER, IDENTITY = "tracking", "run.json"  # in the run's folder
PROJECT = "tightfit"  # where the environment names none


class Tracker(Protocol):
    """Receives figures by name. Any method may raise anything: the training goes on."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write what is not written yet. `summary` are the run's results, empty where it has none."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that trackers write to: the same before and after a resume."""

    identity: str
    name: str
    folder: Path  # for files of trackers, in the run's own folder
    is_resumed: bool
    config: Mapping[str, Any]


def demand_packages(names: Sequence[str]) -> None:
    """Raises `ConfigError` unless the packages of these trackers are installed. Imports none of them."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"output.track: {name} needs the package {PACKAGES[name]}, which is not installed: {INSTALL_HINT}, or "
                f"remove {name} from the list"
            )


def tracked_run(run_folder: Path, config: Mapping[str, Any]) -> TrackedRun:
    """The run of a folder: the one that its trackers wrote to before, or a new one."""
    folder = run_folder / FOLDER
    written = _identity_in(folder / IDENTITY)
    identity = written or uuid.uuid4().hex[:12]
    if written is None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / IDENTITY).write_text(json.dumps({"id": identity}) + "\n", "utf-8")
    return TrackedRun(identity, run_folder.resolve().name, folder, written is not None, config)


def _identity_in(path: Path) -> str | None:
    """None where there is none, or none that can be read: the trackers begin a new run then."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    identity = raw.get("id") if isinstance(raw, dict) else None
    return identity if isinstance(identity, str) and identity.isalnum() else None
