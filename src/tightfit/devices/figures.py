"""A device in a handful of figures, whether they were measured or published: what a table of devices shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.devices.families import Family
from tightfit.devices.spec import DeviceSpec

LAYOUT = "nt"  # of the products whose rate stands for all: that of a linear layer's forward
FLOPS_PER_MULTIPLY_ADD = 2
LINK_SHARE = 0.8  # of a link's published rate that copies reach: assumed


@dataclass(frozen=True)
class Figures:
    """Rates of a device: reached where it was measured, at most where they are published.

    `flops_per_second` of large matrix products by dtype, `memory_bytes_per_second` of elementwise operators,
    `link_bytes_per_second` from pinned host memory; None where there is none.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float | None
    link_bytes_per_second: float | None
    compute_capability: tuple[int, int] | None


def figures_of(spec: DeviceSpec) -> Figures:
    """The figures of a spec, of either form."""
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
    """Bytes per second from the memory that computes to where values are offloaded, and back."""

    away: float
    back: float


def copy_rates(spec: DeviceSpec) -> CopyRates | None:
    """Rates between a CUDA device and pinned host memory; None for a CPU, and where they were not measured.

    Of a published rate copies are assumed to reach `LINK_SHARE`.
    """
    if spec.roofline is not None:
        rate = spec.roofline.link_bytes_per_second * LINK_SHARE
        return CopyRates(rate, rate)
    measured = spec.link_bytes_per_second
    if "to_host/pinned" not in measured or "to_device/pinned" not in measured:
        return None
    return CopyRates(measured["to_host/pinned"], measured["to_device/pinned"])


def product_rates(spec: DeviceSpec, layout: str = LAYOUT) -> dict[str, float]:
    """FLOP/s that products of a layout approach as all of their sides grow, by dtype."""
    found = {key.partition("/")[2]: law[0] for key, law in spec.products.items() if key.partition("/")[0] == layout}
    return {dtype: FLOPS_PER_MULTIPLY_ADD / seconds for dtype, seconds in found.items() if seconds > 0}


def _memory_rate(spec: DeviceSpec) -> float | None:
    """Bytes per second of the largest elementwise operator that was measured."""
    curve = spec.streams.get(f"{Family.ARITHMETIC}/float32")
    return None if not curve else curve[-1][0] / curve[-1][1]
