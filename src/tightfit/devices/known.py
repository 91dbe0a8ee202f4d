"""Graphics cards by name, for devices that are not present.

`known.toml` has the makers' published figures. `kernels.toml` has the shares of them that kernels reach, fitted to
published measurements.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from tightfit.devices.spec import DeviceSpec, Kernels, Roofline

# Bytes per second of a PCIe lane in one direction, by generation: transfers per second less the line code (128b/130b).
LANE_BYTES_PER_SECOND = {generation: 2 ** (generation - 3) * 8e9 / 8 * 128 / 130 for generation in (3, 4, 5)}

# Words that people and drivers write around a card's number.
_DECORATION = re.compile(r"nvidia|geforce|tesla|quadro|rtx|gtx|gib|gb|[^a-z0-9]")


@dataclass(frozen=True)
class KnownDevice:
    """A device of the list: its key, other names, its figures, and their sources."""

    key: str
    aliases: tuple[str, ...]
    spec: DeviceSpec
    memory_source: str
    sources: tuple[str, ...]
    kernels_source: str


def plain(name: str) -> str:
    """`"NVIDIA GeForce RTX 4090"`, `"rtx-4090"` and `"4090"` are all `"4090"`."""
    return _DECORATION.sub("", name.lower())


@cache
def known_devices() -> Mapping[str, KnownDevice]:
    """Every device of the list, by key."""
    return {key: _device(key, entry) for key, entry in _table("known.toml")["device"].items()}


@dataclass(frozen=True)
class Host:
    """The machine in which a card is: in words, the rate at which it works in its memory, how much it has, and the rate
    at which its drive is read.
    """

    words: str
    bytes_per_second: float | None = None
    memory_bytes: int | None = None
    drive_bytes_per_second: float | None = None


@cache
def known_hosts() -> Mapping[str, Host]:
    """Kinds of machines, by name."""
    table = dict(_table("known.toml")["hosts"])
    share = table.pop("share")

    def of(name: str, channels: int, megatransfers: int) -> Host:
        words = f"{name}: {channels} channels of DDR5-{megatransfers}, {share:.0%} of their rate assumed"
        return Host(words, share * channels * 8 * megatransfers * 1e6)

    return {name: of(name, **entry) for name, entry in table.items()}


@cache
def kernels_of(kind: str) -> Kernels:
    """The figures of kernels on a kind of cards, as named in `kernels.toml`."""
    entry = _table("kernels.toml")[kind]
    return Kernels(**{key: value for key, value in entry.items() if key != "source"})


@cache
def _table(name: str) -> Mapping[str, Any]:
    return tomllib.loads(resources.files("tightfit.devices").joinpath(name).read_text(encoding="utf-8"))


def find(name: str) -> KnownDevice | None:
    """The device with a name, in any spelling; None if it is not in the list."""
    return _by_plain_name().get(plain(name))


def closest(name: str, capability: tuple[int, int], memory_bytes: int) -> DeviceSpec:
    """The published figures of a card that is there: its own, or else those of the card of the list that is most like
    it, by compute capability and memory. The memory is the card's own.
    """
    known = find(name)

    def distance(device: KnownDevice) -> tuple[float, float]:
        major, minor = device.spec.compute_capability or (0, 0)
        apart = abs(10 * major + minor - 10 * capability[0] - capability[1])
        return apart, abs(device.spec.memory_bytes - memory_bytes)

    spec = (known or min(known_devices().values(), key=distance)).spec
    return replace(spec, memory_bytes=memory_bytes, compute_capability=capability)


def others_of(name: str) -> tuple[str, ...]:
    """The keys of the other cards that share a name with the one that `find` takes for it."""
    return _common().get(plain(name), ())[1:]


def nearest(name: str, others: tuple[str, ...] = ()) -> list[str]:
    """The keys of devices with the most similar names, and the most similar `others`; the best first."""
    keys = {**{plain(key): key for key in known_devices()}, **{other: other for other in others}}
    wanted = plain(name)
    # A common beginning counts more than common letters: "a100" means one of the A100s.
    begins = [key for short, key in keys.items() if wanted and (short.startswith(wanted) or wanted.startswith(short))]
    alike = [keys[short] for short in difflib.get_close_matches(wanted or name.lower(), keys, n=3)]
    begins.sort(key=lambda key: (not plain(key).startswith(wanted), len(key)))  # rtx3090 before rtx3090ti
    return list(dict.fromkeys((*begins, *alike)))


@cache
def _by_plain_name() -> Mapping[str, KnownDevice]:
    shared = {name: known_devices()[keys[0]] for name, keys in _common().items()}
    return shared | {plain(name): d for d in known_devices().values() for name in (d.key, d.spec.name, *d.aliases)}


def common_names() -> Mapping[str, tuple[str, ...]]:
    """The keys of the cards that share a name, by that name; the most usual card first."""
    return {name: tuple(keys) for name, keys in _table("known.toml")["common"].items()}


@cache
def _common() -> Mapping[str, tuple[str, ...]]:
    return {plain(name): keys for name, keys in common_names().items()}


def _device(key: str, entry: Mapping[str, Any]) -> KnownDevice:
    roofline = Roofline(
        flops_per_second={dtype: rate * 1e12 for dtype, rate in entry["teraflops"].items()},
        memory_bytes_per_second=entry["gigabytes_per_second"] * 1e9,
        link_bytes_per_second=_link_rate(entry["link"]),
        sm_count=entry["sm_count"],
        peer_bytes_per_second=entry.get("peer_gigabytes_per_second", 0) * 1e9,
        kernels=kernels_of(entry["kernels"]),
    )
    major, minor = entry["compute_capability"]
    launch, host = roofline.kernels.launch_seconds, _table("known.toml")["host"]
    spec = DeviceSpec(
        name=entry["name"],
        kind="cuda",
        memory_bytes=int(entry["memory_gib"] * 2**30),
        compute_capability=(major, minor),
        sm_count=entry["sm_count"],
        roofline=roofline,
        recording_seconds=host["recording"] * launch,
        replaying_seconds=host["replaying"] * launch,
        captured_seconds=host["captured"] * launch,
    )
    kernels_source = _table("kernels.toml")[entry["kernels"]]["source"]
    aliases, sources = tuple(entry.get("aliases", ())), tuple(entry["source"])
    return KnownDevice(key, aliases, spec, entry["memory_source"], sources, kernels_source)


def _link_rate(link: Mapping[str, float]) -> float:
    """Bytes per second of the link to the host, in one direction."""
    if "gigabytes_per_second" in link:
        return link["gigabytes_per_second"] * 1e9
    return link["lanes"] * LANE_BYTES_PER_SECOND[int(link["pcie"])]
