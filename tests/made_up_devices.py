"""What the suite takes for the CPU that is present: made-up figures, so that no test turns with the machine it runs on.

`--calibration NAME` of pytest takes another one of `CALIBRATIONS`; the suite has to pass with each of them.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from tightfit.devices.families import STREAM_UNITS, Family, WorkUnit
from tightfit.devices.spec import AttentionPoint, Curve, DeviceSpec
from tightfit.memory.disk import DiskRates

DTYPES = ("float32", "bfloat16", "float16")
MIXED = (Family.COPY, Family.ARITHMETIC)  # the families with operators whose inputs and outputs differ in width
SECONDS_PER_ELEMENT = {Family.RANDOM: 1.5e-8, Family.SORT: 4e-8, Family.NORM: 5e-10}
DISK = DiskRates(1e9, 1e9)


def even() -> DeviceSpec:
    """Two cores of a server of the year 2024, in round figures."""
    return DeviceSpec(
        name="made up",
        kind="cpu",
        memory_bytes=16 * 2**30,
        torch_version="2.13.0",
        threads=2,
        products={
            f"{kind}/{dtype}": (seconds, 5e-10, 5e-10, 5e-10, call)
            for kind in ("nn", "nt", "tn", "tt", "batched")
            for dtype, seconds, call in (
                ("float32", 2e-11, 1e-5), ("bfloat16", 1e-11, 5e-5), ("float16", 1e-10, 1e-5),
            )
        },
        attention={
            f"{direction}/{mask}/{dtype}": tuple(
                AttentionPoint(length, width, factor * share * width * 1e-10)
                for length in (128, 256, 512, 1024)
                for width in (32, 128)
            )
            for direction, factor in (("forward", 1), ("backward", 2))
            for mask, share in (("full", 1.0), ("causal", 0.6))
            for dtype in ("float32", "bfloat16")
        },
        streams={
            f"{family}/{dtype}": _line(family)
            for family in STREAM_UNITS
            for dtype in (*DTYPES[:2], *(("mixed",) if family in MIXED else ()))
        },
        fresh_threshold_bytes=32 * 2**20,
        fresh_seconds_per_byte=4e-10,
        framework_seconds=5e-6,
        recording_seconds=5e-5,
        replaying_seconds=2.5e-5,
        captured_seconds=4e-6,
    )  # fmt: skip


def _line(family: Family) -> Curve:
    per_unit = 1e-10 if STREAM_UNITS[family] is WorkUnit.BYTES else SECONDS_PER_ELEMENT.get(family, 1e-9)
    return tuple((size, 2e-5 + per_unit * size) for size in (1e2, 1e5, 1e6, 1e7))


def slow_products() -> DeviceSpec:
    """Products, and attention with them, take twice as long."""
    spec = even()
    return replace(
        spec,
        products={key: tuple(2 * figure for figure in law) for key, law in spec.products.items()},
        attention={key: tuple(_slower(point, 2) for point in law) for key, law in spec.attention.items()},
    )


def slow_memory() -> DeviceSpec:
    """What is bound by memory takes twice as long, and so does memory that is fresh."""
    spec = even()
    by_bytes = {family.value for family, unit in STREAM_UNITS.items() if unit is WorkUnit.BYTES}
    streams = {key: _times(law, 2) if key.partition("/")[0] in by_bytes else law for key, law in spec.streams.items()}
    return replace(spec, streams=streams, fresh_seconds_per_byte=2 * spec.fresh_seconds_per_byte)


def busy_hour() -> DeviceSpec:
    """Measured while others were at work: each figure up to three times as long, and said so."""
    spec, draw = even(), random.Random(0)
    return replace(
        spec,
        products={key: tuple(draw.uniform(1, 3) * figure for figure in law) for key, law in spec.products.items()},
        attention={
            key: tuple(_slower(point, draw.uniform(1, 3)) for point in law) for key, law in spec.attention.items()
        },
        streams={key: _times(law, draw.uniform(1, 3)) for key, law in spec.streams.items()},
        framework_seconds=8 * spec.framework_seconds,
        recording_seconds=2 * spec.recording_seconds,
        replaying_seconds=3 * spec.replaying_seconds,
        captured_seconds=3e-5,
        disturbed_by="other processes kept 1.5 of 2 cores busy",
    )


def _slower(point: AttentionPoint, factor: float) -> AttentionPoint:
    return replace(point, seconds_per_score=factor * point.seconds_per_score)


def _times(law: Curve, factor: float) -> Curve:
    return tuple((size, factor * seconds) for size, seconds in law)


CALIBRATIONS: dict[str, Callable[[], DeviceSpec]] = {
    "even": even, "slow-products": slow_products, "slow-memory": slow_memory, "busy-hour": busy_hour,
}  # fmt: skip
