"""Takes rough figures of a device that was not measured yet, in about a second.

A calibration takes fifteen seconds on a quiet machine and minutes on a busy one. The first estimate does not wait for
it. A CPU gets the figures of another CPU, each scaled by how much longer a quick call of its kind takes here. A card
gets the published figures of its name, or of the card of the list that is most like it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources

import psutil
import torch

from tightfit.devices.cost import interpolate
from tightfit.devices.families import STREAM_UNITS, Family, WorkUnit
from tightfit.devices.known import closest
from tightfit.devices.machine import device_name
from tightfit.devices.spec import DeviceSpec, Kind
from tightfit.devices.timing import Call, fastest
from tightfit.runtime.outside import outside_training

SECONDS = 0.2  # for all quick calls together, and up to twice as long while their times still fall
ROUNDS = 20
SIDE = 512  # of the products
LARGE, MIDDLE, SMALL = 2**22, 2**18, 64  # numbers: beyond most caches, within them, and no work to speak of
_HALF = ("bfloat16", "float16")


@cache
def reference() -> DeviceSpec:
    """The measured CPU whose figures are scaled. `benchmarks/step_time.py` calibrates it and writes the file."""
    file = resources.files("tightfit.devices").joinpath("cpu.json")
    with resources.as_file(file) as path:
        return DeviceSpec.from_json(path)


def rough(kind: Kind) -> DeviceSpec:
    """The rough figures of the present device; `DeviceSpec.scaled_from` says whose they are."""
    if kind == "cuda":
        found = closest(device_name(kind), torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[1])
        return replace(found, name=device_name(kind), scaled_from=f"the published figures of {found.name}")
    return scaled(reference(), _quick_seconds())


def scaled(known: DeviceSpec, seconds: Mapping[str, float]) -> DeviceSpec:
    """The figures of `known`, scaled to the `seconds` that quick calls take on the present CPU."""
    ratio = {name: spent / _seconds_of(name, known) for name, spent in seconds.items()}
    of_product = {"float32": ratio["float32"], "mixed": ratio["float32"], **dict.fromkeys(_HALF, ratio["bfloat16"])}
    of_stream = {WorkUnit.BYTES: ratio["memory"], WorkUnit.ELEMENTS: ratio["elements"]}
    host = ratio["host"]
    return replace(
        known,
        name=device_name("cpu"),
        memory_bytes=psutil.virtual_memory().total,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        products={
            key: (*(of_product[_dtype(key)] * figure for figure in law[:4]), host * law[4])
            for key, law in known.products.items()
        },
        attention={
            key: tuple(
                replace(point, seconds_per_score=of_product[_dtype(key)] * point.seconds_per_score) for point in points
            )
            for key, points in known.attention.items()
        },
        streams={
            key: tuple((size, of_stream[STREAM_UNITS[Family(key.partition("/")[0])]] * spent) for size, spent in curve)
            for key, curve in known.streams.items()
        },
        fresh_seconds_per_byte=ratio["memory"] * known.fresh_seconds_per_byte,
        framework_seconds=host * known.framework_seconds,
        recording_seconds=host * known.recording_seconds,
        replaying_seconds=host * known.replaying_seconds,
        captured_seconds=None if known.captured_seconds is None else host * known.captured_seconds,
        disturbed_by="",
        scaled_from=f"the measured figures of {known.name}, scaled by quick calls",
    )


@outside_training()
def _quick_seconds() -> dict[str, float]:
    """The least seconds of each quick call. Does not use the user's random generators."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return fastest(_calls(), "cpu", SECONDS, ROUNDS)


def _calls() -> dict[str, Call]:
    large, middle, small = (torch.ones(3, size) for size in (LARGE, MIDDLE, SMALL))
    products = {name: torch.ones(3, SIDE, SIDE, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}

    def product(name: str) -> Call:
        left, right, out = products[name]
        return lambda: torch.mm(left, right.t(), out=out)

    return {
        "float32": product("float32"),
        "bfloat16": product("bfloat16"),
        "memory": lambda: torch.add(large[0], large[1], out=large[2]),
        "elements": lambda: torch.exp(middle[0], out=middle[1]),
        "host": lambda: torch.add(small[0], small[1], out=small[2]),
    }


def _seconds_of(name: str, known: DeviceSpec) -> float:
    """The seconds of a quick call by the figures of a measured CPU."""
    if name in ("float32", "bfloat16"):
        whole, *sides, call = known.products[f"nt/{name}"]
        return whole * SIDE**3 + sum(sides) * SIDE**2 + call
    if name == "elements":
        return interpolate(known.streams[f"{Family.TRANSCENDENTAL}/float32"], MIDDLE)
    moved = 3 * 4 * (LARGE if name == "memory" else SMALL)  # two operands and a result of four bytes
    return interpolate(known.streams[f"{Family.ARITHMETIC}/float32"], moved)


def _dtype(key: str) -> str:
    return key.rpartition("/")[2]
