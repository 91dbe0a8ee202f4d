"""The device that is present, calibrated at its first use and remembered; devices by name."""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tightfit.devices.calibrate import calibrate
from tightfit.devices.described import Description, changed, of_ones_own, read_description
from tightfit.devices.known import KnownDevice, find, nearest
from tightfit.devices.machine import device_name, fingerprint
from tightfit.devices.quiet import is_quiet_now
from tightfit.devices.spec import DeviceSpec, Kind
from tightfit.errors import DeviceError

Notice = Callable[[str], None]

LOOKED_AGAIN_AFTER = 60.0  # seconds: whether a machine that was busy is quiet now

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

    `kind` None is the CUDA device if there is one, else the CPU. Figures that were measured while the machine was busy
    are measured again at the next use that finds it quiet. `notice` is told in one line when the measuring begins, when
    it was disturbed, and when the cache could not be used. Raises `DeviceError` where there is no such device.
    """
    kind = _here(kind)
    tell = notice or _say_nothing
    kept = cached(kind, tell)
    if kept is None:
        return measure(kind, tell)
    if not kept.disturbed_by:
        return kept
    if _may_be_looked_at_again(cache_path(kind)) and is_quiet_now(torch.get_num_threads()):
        tell("the machine was busy when it was measured and is quiet now: measuring again")
        return measure(kind, tell)
    tell(f"predicted seconds are rough: while {kept.name} was measured, {kept.disturbed_by}")
    return kept


def cached(kind: Kind, notice: Notice | None = None) -> DeviceSpec | None:
    """The figures in the cache; None where there are none, or none that can be read (which `notice` is told)."""
    path = cache_path(kind)
    if not path.exists():
        return None
    try:
        return DeviceSpec.from_json(path)
    except DeviceError as error:
        (notice or _say_nothing)(f"{error}; measuring anew")
        return None


def measure(kind: Kind | None = None, notice: Notice | None = None) -> DeviceSpec:
    """Measure the device that is present now, whatever the cache holds, and keep the figures there."""
    kind, tell = _here(kind), notice or _say_nothing
    tell(f"measuring {device_name(kind)} once, about 10 seconds")
    spec = calibrate(kind)
    if spec.disturbed_by:
        tell(f"the machine was busy ({spec.disturbed_by}): predicted seconds are rough until it is measured when quiet")
    path = cache_path(kind)
    try:
        _write_whole(path, json.dumps(spec.to_dict(), indent=1) + "\n")
    except OSError as error:
        tell(f"the figures could not be kept in {path} ({error.strerror}): they are measured again next time")
    return spec


def cache_path(kind: Kind) -> Path:
    """The file that holds the figures of the device that is present."""
    return cache_folder() / f"{kind}-{fingerprint(kind)}.json"


def _here(kind: Kind | None) -> Kind:
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda': this PyTorch finds no CUDA device: use 'cpu', or leave the device out")
    return kind


def _may_be_looked_at_again(path: Path) -> bool:
    """Whether the file's time, that of the last look, lies far enough back; it is set to now."""
    if time.time() - path.stat().st_mtime < LOOKED_AGAIN_AFTER:
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is looked at each time
        path.touch()
    return True


def lookup(name: str | torch.device | DeviceSpec | None = None, notice: Notice | None = None) -> DeviceSpec:
    """The figures of a device by name.

    None, `"cpu"`, `"cuda"` or a `torch.device` is one that is present; `"rtx4090"`, `"RTX 4090"` or `"a100-40"` is a
    card of the list, measured figures where it is the one that is present, published ones elsewhere; a `DeviceSpec` is
    itself. Figures of the user's may follow a name (`"rtx3080,memory=8GiB"`), or stand for it (`devices.described`).
    Raises `DeviceError`, with the nearest names, for a name that is not known, and for figures that cannot be read.
    """
    if isinstance(name, DeviceSpec):
        return name
    description = read_description(name) if isinstance(name, str) else None
    if description is not None:
        return _described(description, notice)
    kind = _present_kind(name)
    if kind is not None or name is None:
        return present(kind, notice)
    known = find(str(name))
    if known is None:
        near = nearest(str(name), PRESENT_KINDS) or [*PRESENT_KINDS, "one that `tightfit devices` shows"]
        raise DeviceError(f"device {str(name)!r} is not known: did you mean {' or '.join(near)}?")
    return present("cuda", notice) if is_present(known) else known.spec


def _described(description: Description, notice: Notice | None) -> DeviceSpec:
    """The device of a description. Published figures serve for a card that is present, where rates of it are given."""
    if not description.base:
        return of_ones_own(description)
    known = find(description.base)
    if known is not None and set(description.figures) != {"memory"}:
        return changed(known.spec, description)
    return changed(lookup(description.base, notice), description)


def lookup_present(name: str | torch.device | None, notice: Notice | None = None) -> DeviceSpec:
    """Like `lookup`, for a device that is to run something. Raises `DeviceError` where it is not here."""
    description = read_description(name) if isinstance(name, str) else None
    base = name if description is None else description.base
    known = None if base is None or _present_kind(base) is not None else find(str(base))
    if (known is not None and not is_present(known)) or base == "":
        raise DeviceError(
            f"device {str(name)!r} is not in this machine: estimate and plan can be asked about it, but to run "
            "something take 'auto', 'cpu' or 'cuda'"
        )
    return lookup(name, notice)


def is_present(known: KnownDevice) -> bool:
    """Whether the current CUDA device is this one."""
    if not torch.cuda.is_available():
        return False
    here = find(device_name("cuda"))
    return here is not None and here.key == known.key


def _present_kind(name: str | torch.device | None) -> Kind | None:
    """The kind that a name like `"cuda:0"` means; None for the name of a card, or none."""
    kind = str(name).partition(":")[0].lower()
    return next((known for known in PRESENT_KINDS if kind == known), None)


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
