"""A device with round figures, so that expected seconds can be worked out by hand."""

from tightfit.devices.families import STREAM_UNITS
from tightfit.devices.spec import AttentionPoint, DeviceSpec

MIB = 2**20


def round_device() -> DeviceSpec:
    """1e9 multiply-adds a second, 1e9 bytes or elements a second, 1 µs a call, 1 ns for a fresh byte from 32 MiB on."""
    kinds = ("nn", "nt", "tn", "tt", "batched")
    masks = {"full": 2e-9, "causal": 1e-9}
    return DeviceSpec(
        name="round",
        kind="cpu",
        memory_bytes=8 * 2**30,
        torch_version="2.13.0",
        threads=2,
        products={f"{kind}/float32": (1e-9, 0.0, 0.0, 0.0, 1e-6) for kind in kinds}
        | {f"{kind}/bfloat16": (0.25e-9, 0.0, 0.0, 0.0, 1e-6) for kind in kinds},
        attention={
            f"{direction}/{mask}/float32": tuple(
                AttentionPoint(length, width, factor * seconds * width / 64)
                for length in (128, 1024)
                for width in (32, 128)
            )
            for direction, factor in (("forward", 1), ("backward", 3))
            for mask, seconds in masks.items()
        },
        streams={f"{family}/float32": ((1e3, 1e-6), (1e6, 1e-3), (1e9, 1.0)) for family in STREAM_UNITS},
        fresh_threshold_bytes=32 * MIB,
        fresh_seconds_per_byte=1e-9,
    )
