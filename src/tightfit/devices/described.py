"""Devices with the user's own figures: `"rtx3080,memory=8GiB"`, or without a name `"memory=8GiB,bandwidth=400GB/s"`."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tightfit.devices.known import Host, known_devices, known_hosts
from tightfit.devices.spec import DeviceSpec, Roofline
from tightfit.errors import DeviceError
from tightfit.units import BYTE_UNITS

_NUMBER = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z/]*)")
_BYTES_PER_SECOND = {f"{unit}/s": size for unit, size in BYTE_UNITS.items() if unit not in ("", "b")}
_PREFIXES = {"g": 1e9, "t": 1e12, "p": 1e15}
_FLOPS = {f"{prefix}{word}": size for prefix, size in _PREFIXES.items() for word in ("flops", "flop/s", "flops/s")}
DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Figure:
    """A key of a description: the parser of its text (None: invalid), the expected value in words, and an example."""

    read: Callable[[str], Any]
    wanted: str
    example: str


def _amount(units: Mapping[str, float]) -> Callable[[str], float | None]:
    def read(text: str) -> float | None:
        match = _NUMBER.fullmatch(text)
        factor = units.get(match[2].lower()) if match else None
        return None if match is None or factor is None else float(match[1]) * factor or None

    return read


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))


_sizes = _amount({unit: size for unit, size in BYTE_UNITS.items() if unit})
_rates = _amount(_BYTES_PER_SECOND)
_products = _amount(_FLOPS)
FIGURES = {
    "memory": Figure(_sizes, "bytes with their unit, all that the device holds", "8GiB"),
    "bandwidth": Figure(_rates, "the rate of its memory", "400GB/s"),
    **{name: Figure(_products, f"the rate of {name} products", "20TFLOPS") for name in DTYPES},
    "capability": Figure(_capability, "CUDA's compute capability", "8.6"),
    "link": Figure(_rates, "the rate between host and device, one way", "16GB/s"),
    "sms": Figure(lambda text: int(text) if text.isdecimal() and int(text) else None, "its multiprocessors", "68"),
}
OF_A_HOST = {
    **{key: FIGURES[key] for key in ("memory", "bandwidth")},
    "drive": Figure(_rates, "the rate at which its drive is read", "3GB/s"),
}
OF_ONES_OWN = ("memory", "bandwidth", "fp32", "capability")  # the figures that a device without a name must have


@dataclass(frozen=True)
class Description:
    """A parsed description: the name of a base device (may be empty), and the figures that replace its own."""

    text: str
    base: str
    figures: Mapping[str, Any]

    @property
    def given(self) -> str:
        """The figures as the user wrote them."""
        return self.text.partition(",")[2].strip() if self.base else self.text


def read_description(text: str) -> Description | None:
    """Parse a device's text. None if it is only a name. Raises `DeviceError` for an invalid text."""
    first, *rest = (item.strip() for item in text.split(","))
    items = rest if "=" not in first else [first, *rest]
    if not items:
        return None
    figures: dict[str, Any] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise DeviceError(f"device {text!r}: {item!r} has no value: write key=value, for example memory=8GiB")
        if key not in FIGURES:
            near = difflib.get_close_matches(key, FIGURES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(FIGURES)}"
            raise DeviceError(f"device {text!r}: {key!r} is not known: {hint}")
        if key in figures:
            raise DeviceError(f"device {text!r}: {key} is given twice: keep one of them")
        figures[key] = FIGURES[key].read(value)
        if figures[key] is None:
            wanted = FIGURES[key]
            raise DeviceError(
                f"device {text!r}: {key} is {value!r}, wanted {wanted.wanted}: for example {wanted.example}"
            )
    return Description(text, "" if "=" in first else first, figures)


def host_named(text: str) -> Host:
    """The host of a card: a name (`"workstation"`), figures (`"memory=64GiB,bandwidth=80GB/s"`), or both.

    Raises `DeviceError` for an unknown name and for invalid figures.
    """
    first, *items = (item.strip() for item in text.split(","))
    if "=" in first:
        first, items = "", [first, *items]
    if first and first not in known_hosts():
        raise DeviceError(
            f"host {text!r}: {first!r} is not known: choose from {', '.join(known_hosts())}, or give figures, for "
            "example memory=64GiB,bandwidth=80GB/s"
        )
    base = known_hosts()[first] if first else Host("")
    figures: dict[str, float] = {}
    for item in items:
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in OF_A_HOST:
            raise DeviceError(f"host {text!r}: {key!r} is not known: choose from {', '.join(OF_A_HOST)}")
        read = OF_A_HOST[key].read(value)
        if read is None or key in figures:
            wrong = "is given twice: keep one of them" if key in figures else f"is {value!r}, wanted for example "
            raise DeviceError(f"host {text!r}: {key} {wrong}{'' if key in figures else OF_A_HOST[key].example}")
        figures[key] = read
    rate, memory = figures.get("bandwidth", base.bytes_per_second), figures.get("memory")
    words = base.words if "bandwidth" not in figures else "as --host says"
    return Host(words, rate, None if memory is None else int(memory), figures.get("drive"))


def with_host(spec: DeviceSpec, text: str) -> DeviceSpec:
    """A card in a machine. Raises `DeviceError` on a CPU, and for an invalid text."""
    host = host_named(text)
    if spec.kind == "cpu":
        raise DeviceError(
            f"host {text!r}: {spec.name} is the host itself: leave --host out, or name a card with --device"
        )
    if host.bytes_per_second is not None:
        spec = replace(
            spec,
            host_bytes_per_second=host.bytes_per_second,
            host=host.words,
            host_update_bytes_per_second=None,
        )
    return replace(spec, drive_bytes_per_second=host.drive_bytes_per_second or spec.drive_bytes_per_second)


def changed(spec: DeviceSpec, description: Description) -> DeviceSpec:
    """A device with some figures replaced by the user's.

    Rates can replace published ones only, because measured figures are more than one number for each rate. Raises
    `DeviceError` for rates of a measured device.
    """
    figures = description.figures
    if spec.roofline is None and set(figures) != {"memory"}:
        raise DeviceError(
            f"device {description.text!r}: {spec.name} was measured here, so only its memory can be set: leave out the "
            "other figures, or leave out the name and give all of them"
        )
    return replace(
        spec,
        name=f"{spec.name} with {description.given}",
        memory_bytes=int(figures.get("memory", spec.memory_bytes)),
        compute_capability=figures.get("capability", spec.compute_capability),
        sm_count=figures.get("sms", spec.sm_count),
        roofline=None if spec.roofline is None else _roofline(spec.roofline, figures),
    )


def of_ones_own(description: Description) -> DeviceSpec:
    """A device from the user's figures alone.

    Missing figures are those of the most similar card in the list: the same compute capability, and the nearest fp32
    rate. Figures that grow with a card's size are scaled by that rate. Raises `DeviceError` if a required figure is
    missing.
    """
    figures, text = description.figures, description.text
    if missing := [key for key in OF_ONES_OWN if key not in figures]:
        raise DeviceError(
            f"device {text!r} lacks {', '.join(missing)}: give {'it' if len(missing) == 1 else 'them'}, for example "
            f"{','.join(f'{key}={FIGURES[key].example}' for key in missing)}, or begin with a card's name: "
            "rtx3080,memory=8GiB"
        )
    like = most_alike(figures["capability"], figures["fp32"])
    if like is None:
        raise DeviceError(
            f"device {text!r}: no card of compute capability {figures['capability'][0]} is in the list: use that of a "
            "card that `tightfit devices --json` shows"
        )
    assert like.roofline is not None, "cards of the list have published figures"
    assert like.sm_count is not None, "cards of the list have multiprocessors"
    scale = figures["fp32"] / like.roofline.flops_per_second["float32"]
    rates = {dtype: rate * scale for dtype, rate in like.roofline.flops_per_second.items()}
    template = replace(
        like, sm_count=max(1, round(like.sm_count * scale)), roofline=replace(like.roofline, flops_per_second=rates)
    )
    return replace(changed(template, description), name=f"{description.given} (else as {like.name})")


def most_alike(capability: tuple[int, int], fp32: float) -> DeviceSpec | None:
    """The card with the nearest fp32 rate, among those of this compute capability, or else of its first number."""
    specs = [known.spec for known in known_devices().values()]
    same = [s for s in specs if s.compute_capability == capability] or [
        s for s in specs if s.compute_capability is not None and s.compute_capability[0] == capability[0]
    ]

    def distance(spec: DeviceSpec) -> float:
        assert spec.roofline is not None, "cards of the list have published figures"
        rate = spec.roofline.flops_per_second["float32"]
        return max(rate, fp32) / min(rate, fp32)

    return min(same, key=distance, default=None)


def _roofline(roofline: Roofline, figures: Mapping[str, Any]) -> Roofline:
    given = {dtype: figures[name] for name, dtype in DTYPES.items() if name in figures}
    return replace(
        roofline,
        flops_per_second={**roofline.flops_per_second, **given},
        memory_bytes_per_second=figures.get("bandwidth", roofline.memory_bytes_per_second),
        link_bytes_per_second=figures.get("link", roofline.link_bytes_per_second),
    )
