"""Looks up devices by name. A present device has rough figures at first use and measured ones once something trained or
`tightfit calibrate` ran. Both are cached.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tightfit.devices.cache import cache_folder
from tightfit.devices.calibrate import calibrate
from tightfit.devices.described import Description, changed, of_ones_own, read_description
from tightfit.devices.known import KnownDevice, closest, find, nearest, others_of
from tightfit.devices.machine import device_name, fingerprint
from tightfit.devices.quiet import is_quiet_now
from tightfit.devices.room import NoRoom
from tightfit.devices.rough import rough
from tightfit.devices.spec import DeviceSpec, Kind
from tightfit.errors import DeviceError
from tightfit.runtime.simulation import NULL_CARD

Notice = Callable[[str], None]

LOOKED_AGAIN_AFTER = 60.0  # seconds between checks whether a machine that was busy is quiet now

PRESENT_KINDS: tuple[Kind, ...] = ("cpu", "cuda")


def present(kind: Kind | None = None, notice: Notice | None = None, *, measured: bool = False) -> DeviceSpec:
    """The figures of the present device from the cache, or else rough ones, taken in about a second.

    `kind` None is the CUDA device if there is one, else the CPU. With `measured`, a device that has rough figures or
    none is measured now, and so is one that was measured on a busy machine, if the machine is quiet now. `notice` is
    called with one line when a measurement begins, if the figures are rough, and if the cache could not be used. A null
    card computes nothing that could be measured: it has the published figures of its name. Raises `DeviceError` if
    there is no such device.
    """
    kind = _here(kind)
    tell = notice or _say_nothing
    if is_null_card(kind):
        return measure(kind, tell)
    kept = cached(kind, tell)
    if measured and (kept is None or kept.scaled_from):
        return measure(kind, tell)
    if kept is None:
        kept = rough(kind)
        if kind == "cpu":  # a card's are read in no time, and it may leave the machine
            _keep(kept, tell)
    again = measured and kept.disturbed_by and _may_be_looked_at_again(cache_path(kind))
    if again and is_quiet_now(torch.get_num_threads()):
        tell("the machine was busy when it was measured and is quiet now: measuring again")
        return measure(kind, tell)
    if kept.seconds_are_rough:
        tell(kept.seconds_are_rough)
    return kept


def cached(kind: Kind, notice: Notice | None = None) -> DeviceSpec | None:
    """The figures in the cache; None if there are none. If they cannot be read, `notice` is called with the reason."""
    path = cache_path(kind)
    if not path.exists():
        return None
    try:
        return DeviceSpec.from_json(path)
    except DeviceError as error:
        (notice or _say_nothing)(f"{error}; taking new figures")
        return None


def is_null_card(kind: Kind) -> bool:
    """True if the present card computes nothing, so that there is nothing to measure."""
    return kind == "cuda" and NULL_CARD in os.environ and find(device_name(kind)) is not None


def measure(kind: Kind | None = None, notice: Notice | None = None) -> DeviceSpec:
    """Measure the present device now, and replace its figures in the cache. A card without room for that, and one that
    computes nothing, have published figures, which are not kept.
    """
    kind, tell = _here(kind), notice or _say_nothing
    if is_null_card(kind):
        known = find(device_name(kind))
        assert known is not None, "a null card that is none of the list is measured"
        return replace(known.spec, memory_bytes=torch.cuda.get_device_properties().total_memory)
    tell(f"measuring {device_name(kind)} once, about 15 seconds")
    try:
        spec = calibrate(kind)
    except NoRoom:
        known = closest(device_name(kind), torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[1])
        tell(
            f"there is no room to measure {device_name(kind)}, as others hold its memory: predicted seconds follow the "
            f"published figures of {known.name}"
        )
        return replace(known, name=device_name(kind))
    if spec.disturbed_by:
        tell(f"the machine was busy ({spec.disturbed_by}): predicted seconds are rough until it is measured when quiet")
    _keep(spec, tell)
    return spec


def _keep(spec: DeviceSpec, tell: Notice) -> None:
    path = cache_path(spec.kind)
    try:
        _write_whole(path, json.dumps(spec.to_dict(), indent=1) + "\n")
    except OSError as error:
        tell(f"the figures could not be kept in {path} ({error.strerror}): they are taken again next time")


def cache_path(kind: Kind) -> Path:
    """The file with the figures of the present device."""
    return cache_folder() / f"{kind}-{fingerprint(kind)}.json"


def _here(kind: Kind | None) -> Kind:
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda': this PyTorch finds no CUDA device: use 'cpu', or leave the device out")
    return kind


def _may_be_looked_at_again(path: Path) -> bool:
    """True if the last check is long enough ago. The file's time is that of the last check; it is set to now."""
    if time.time() - path.stat().st_mtime < LOOKED_AGAIN_AFTER:
        return False
    with contextlib.suppress(OSError):  # with a cache that cannot be written, each use checks again
        path.touch()
    return True


def lookup(
    name: str | torch.device | DeviceSpec | None = None, notice: Notice | None = None, *, measured: bool = False
) -> DeviceSpec:
    """The figures of a device by name. A present one is measured first if `measured` (see `present`).

    None, `"cpu"`, `"cuda"` or a `torch.device` is a present device. `"rtx4090"`, `"RTX 4090"` or `"a100-40"` is a card
    of the list, with measured figures if it is present, and published ones otherwise. A name that several cards share
    (`"a100"`) is the most usual of them, and `notice` is called with a line that says so. A `DeviceSpec` is returned as
    it is. The user's own figures may follow a name (`"rtx3080,memory=8GiB"`) or replace it (`devices.described`).
    Raises `DeviceError`, with the nearest names, for an unknown name, and for invalid figures.
    """
    if isinstance(name, DeviceSpec):
        return name
    description = read_description(name) if isinstance(name, str) else None
    if description is not None:
        return _described(description, notice, measured)
    kind = _present_kind(name)
    if kind is not None or name is None:
        return present(kind, notice, measured=measured)
    known = _found(str(name), notice)
    if known is None:
        near = nearest(str(name), PRESENT_KINDS) or [*PRESENT_KINDS, "one that `tightfit devices` shows"]
        raise DeviceError(f"device {str(name)!r} is not known: did you mean {' or '.join(near)}?")
    return present("cuda", notice, measured=measured) if is_present(known) else known.spec


def _found(name: str, notice: Notice | None) -> KnownDevice | None:
    """The card of the list with a name. `notice` is called with one line if other cards have that name too."""
    known, others = find(name), others_of(name)
    if known is not None and others and notice is not None:
        notice(f"device {name!r} is taken as {known.spec.name} ({known.key}); its other variants: {', '.join(others)}")
    return known


def _described(description: Description, notice: Notice | None, measured: bool) -> DeviceSpec:
    """The device of a description. With the user's rates, even a present card gets published figures."""
    if not description.base:
        return of_ones_own(description)
    with_rates = set(description.figures) != {"memory"}
    known = _found(description.base, notice) if with_rates else None
    if known is not None:
        return changed(known.spec, description)
    return changed(lookup(description.base, notice, measured=measured), description)


def lookup_present(name: str | torch.device | None, notice: Notice | None = None) -> DeviceSpec:
    """Like `lookup`, for a device that will run something, and so is measured. Raises `DeviceError` if it is not
    present.
    """
    description = read_description(name) if isinstance(name, str) else None
    base = name if description is None else description.base
    known = None if base is None or _present_kind(base) is not None else find(str(base))
    if (known is not None and not is_present(known)) or base == "":
        raise DeviceError(
            f"device {str(name)!r} is not in this machine: estimate and plan work for it, but to run something use "
            "'auto', 'cpu' or 'cuda'"
        )
    return lookup(name, notice, measured=True)


def torch_device(name: str) -> torch.device:
    """The device of a name such as `cpu`, `cuda` or `cuda:1`. Raises `DeviceError` if it is none, or not there."""
    kind, _, index = name.lower().partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(kind)
    if count is None or (index and not index.isdecimal()):
        raise DeviceError(f"device {name!r} is none that runs something: use cpu, cuda or cuda:1")
    if int(index or 0) >= count:
        raise DeviceError(f"device {name!r} is not in this machine, which has {count or 'no'} of its kind: use cpu")
    return torch.device(name.lower())


def is_present(known: KnownDevice) -> bool:
    """True if the current CUDA device is this one."""
    if not torch.cuda.is_available():
        return False
    here = find(device_name("cuda"))
    return here is not None and here.key == known.key


def _present_kind(name: str | torch.device | None) -> Kind | None:
    """The kind of a name like `"cuda:0"`; None for no name, or the name of a card."""
    kind = str(name).partition(":")[0].lower()
    return next((known for known in PRESENT_KINDS if kind == known), None)


def _write_whole(path: Path, text: str) -> None:
    """Write through a temporary file in the same folder. Readers see the old file or the new one, never a part."""
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
    """The default `notice`."""
