"""Summarises a device in a few figures, measured or published, for tables of devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.devices.families import Family
from tightfit.devices.spec import DeviceSpec

LAYOUT = "nt"  # the layout of a linear layer's forward, whose rate represents all products
FLOPS_PER_MULTIPLY_ADD = 2
LINK_SHARE = 0.8  # the assumed share of a link's published rate that copies reach


@dataclass(frozen=True)
class Figures:
    """The rates of a device: the reached ones if it was measured, else the published maxima.

    `flops_per_second` is for large matrix products, by dtype. `memory_bytes_per_second` is for elementwise operators.
    `link_bytes_per_second` is from pinned host memory; None if there is no link.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float | None
    link_bytes_per_second: float | None
    compute_capability: tuple[int, int] | None


def figures_of(spec: DeviceSpec) -> Figures:
    """The figures of a measured or a published spec."""
    roofline = spec.roofline
    return Figures(
        name=spec.name,
        kind=spec.kind,
        memory_bytes=spec.memory_bytes,
        flops_per_second=product_rates(spec) if roofline is None else roofline.flops_per_second,
        memory_bytes_per_second=_memory_rate(spec) if roofline is None else roofline.memory_bytes_per_second,
        link_bytes_per_second=(
            spec.link_bytes_per_second.get("to_device/pinned") if roofline is None else roofline.link_bytes_per_second
        ),
        compute_capability=spec.compute_capability,
    )


class CopyRates(NamedTuple):
    """Bytes per second from the device's memory to the offload store, and back."""

    away: float
    back: float


def copy_rates(spec: DeviceSpec) -> CopyRates | None:
    """Rates between a CUDA device and pinned host memory; None for a CPU, and if they are unknown.

    Copies are assumed to reach `LINK_SHARE` of a published rate.
    """
    if spec.roofline is not None:
        rate = spec.roofline.link_bytes_per_second * LINK_SHARE
        return CopyRates(rate, rate)
    measured = spec.link_bytes_per_second
    if "to_host/pinned" not in measured or "to_device/pinned" not in measured:
        return None
    return CopyRates(measured["to_host/pinned"], measured["to_device/pinned"])


def product_rates(spec: DeviceSpec, layout: str = LAYOUT) -> dict[str, float]:
    """The limit of FLOP/s of products of a layout for growing sides, by dtype."""
    found = {key.partition("/")[2]: law[0] for key, law in spec.products.items() if key.partition("/")[0] == layout}
    return {dtype: FLOPS_PER_MULTIPLY_ADD / seconds for dtype, seconds in found.items() if seconds > 0}


def _memory_rate(spec: DeviceSpec) -> float | None:
    """Bytes per second of the largest measured elementwise operator."""
    curve = spec.streams.get(f"{Family.ARITHMETIC}/float32")
    return None if not curve else curve[-1][0] / curve[-1][1]
