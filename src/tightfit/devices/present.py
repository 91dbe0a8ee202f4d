"""The device that is present, calibrated at its first use and remembered; devices by name."""

import difflib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tightfit.devices.calibrate import calibrate
from tightfit.devices.machine import device_name, fingerprint
from tightfit.devices.spec import DeviceSpec, Kind
from tightfit.errors import DeviceError

Notice = Callable[[str], None]

PRESENT_KINDS: tuple[Kind, ...] = ("cpu", "cuda")


def cache_folder() -> Path:
    """`TIGHTFIT_CACHE`, else the folder where this system keeps users' caches, with `tightfit` below it."""
    if chosen := os.environ.get("TIGHTFIT_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tightfit"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightfit"


def present(kind: Kind | None = None, notice: Notice | None = None) -> DeviceSpec:
    """The figures of the device that is present: from the cache, else measured now and kept there.

    `kind` None is the CUDA device if there is one, else the CPU. `notice` is told in one line when the measuring
    begins, and when the cache could not be used. Raises `DeviceError` where there is no such device.
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda': this PyTorch finds no CUDA device: use 'cpu', or leave the device out")
    tell = notice or _say_nothing
    path = cache_folder() / f"{kind}-{fingerprint(kind)}.json"
    if path.exists():
        try:
            return DeviceSpec.from_json(path)
        except DeviceError as error:
            tell(f"{error}; measuring anew")
    tell(f"measuring {device_name(kind)} once, about 8 seconds")
    spec = calibrate(kind)
    try:
        _write_whole(path, json.dumps(spec.to_dict(), indent=1) + "\n")
    except OSError as error:
        tell(f"the figures could not be kept in {path} ({error.strerror}): they are measured again next time")
    return spec


def lookup(name: str | torch.device | None = None, notice: Notice | None = None) -> DeviceSpec:
    """The figures of a device by name: None, `"cpu"`, `"cuda"` or a `torch.device` for one that is present.

    Raises `DeviceError`, with the nearest names, for a name that is not known.
    """
    if name is None:
        return present(None, notice)
    kind = str(name).partition(":")[0].lower()
    for known in PRESENT_KINDS:
        if kind == known:
            return present(known, notice)
    near = difflib.get_close_matches(kind, PRESENT_KINDS) or PRESENT_KINDS
    raise DeviceError(f"device {str(name)!r} is not known: did you mean {' or '.join(near)}?")


def _write_whole(path: Path, text: str) -> None:
    """Write through a temporary file in the same folder: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _say_nothing(line: str) -> None:
    """Nobody asked to be told."""
