"""Graphics cards by name, from `known.toml`: figures of a device that need not be here."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tightfit.devices.spec import DeviceSpec, Roofline

# Seconds that eager PyTorch takes to launch a kernel, autograd included. Assumed: 5 to 10 µs are usual.
LAUNCH_SECONDS = 7e-6

# Bytes per second of a PCIe lane in one direction, by generation: transfers per second less the line code (128b/130b).
LANE_BYTES_PER_SECOND = {generation: 2 ** (generation - 3) * 8e9 / 8 * 128 / 130 for generation in (3, 4, 5)}

# What people and drivers write around a card's number.
_DECORATION = re.compile(r"nvidia|geforce|tesla|quadro|rtx|gtx|gib|gb|[^a-z0-9]")


@dataclass(frozen=True)
class KnownDevice:
    """A device of the list: its key, other names, its figures, and where they come from."""

    key: str
    aliases: tuple[str, ...]
    spec: DeviceSpec
    memory_source: str
    sources: tuple[str, ...]
    shares_source: str


def plain(name: str) -> str:
    """`"NVIDIA GeForce RTX 4090"`, `"rtx-4090"` and `"4090"` are all `"4090"`."""
    return _DECORATION.sub("", name.lower())


@cache
def known_devices() -> Mapping[str, KnownDevice]:
    """Every device of the list, by key."""
    text = resources.files("tightfit.devices").joinpath("known.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return {key: _device(key, entry, data["sustained"][entry["sustained"]]) for key, entry in data["device"].items()}


def find(name: str) -> KnownDevice | None:
    """The device of a name, however it is written; None for one that is not in the list."""
    return _by_plain_name().get(plain(name))


def nearest(name: str, others: tuple[str, ...] = ()) -> list[str]:
    """The keys of the devices whose names are most like this one, and those of `others`; best first."""
    keys = {**{plain(key): key for key in known_devices()}, **{other: other for other in others}}
    wanted = plain(name)
    # A name that begins like it is nearer than one that shares letters: "a100" means one of the A100s.
    begins = [key for short, key in keys.items() if wanted and (short.startswith(wanted) or wanted.startswith(short))]
    alike = [keys[short] for short in difflib.get_close_matches(wanted or name.lower(), keys, n=3)]
    return list(dict.fromkeys((*begins, *alike)))


@cache
def _by_plain_name() -> Mapping[str, KnownDevice]:
    return {plain(name): d for d in known_devices().values() for name in (d.key, d.spec.name, *d.aliases)}


def _device(key: str, entry: Mapping[str, Any], shares: Mapping[str, Any]) -> KnownDevice:
    roofline = Roofline(
        flops_per_second={dtype: rate * 1e12 for dtype, rate in entry["teraflops"].items()},
        memory_bytes_per_second=entry["gigabytes_per_second"] * 1e9,
        link_bytes_per_second=entry["link"]["lanes"] * LANE_BYTES_PER_SECOND[entry["link"]["pcie"]],
        l2_bytes=int(entry["l2_mib"] * 2**20),
        product_share=shares["products"],
        attention_share=shares["attention"],
        attention_backward_share=shares["attention_backward"],
        stream_share=shares["streams"],
        launch_seconds=LAUNCH_SECONDS,
    )
    major, minor = entry["compute_capability"]
    spec = DeviceSpec(
        name=entry["name"],
        kind="cuda",
        memory_bytes=int(entry["memory_gib"] * 2**30),
        compute_capability=(major, minor),
        sm_count=entry["sm_count"],
        roofline=roofline,
    )
    sources = tuple(entry["source"])
    return KnownDevice(key, tuple(entry.get("aliases", ())), spec, entry["memory_source"], sources, shares["source"])
