"""Devices and calibrations as tables for a terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from tightfit.devices.families import STREAM_UNITS, UNITS, WorkUnit
from tightfit.devices.figures import Figures, product_rates
from tightfit.devices.spec import AttentionPoint, DeviceSpec
from tightfit.planner.report.terminal import narrowed, rendered, table_of
from tightfit.units import format_bytes, format_seconds

DTYPES = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}
LAYOUTS = {"nn": "a @ b", "nt": "a @ b.T", "tn": "a.T @ b", "tt": "a.T @ b.T"}
COLUMNS = ("memory", *DTYPES.values(), "GB/s", "link")
FIRST_LEFT_OUT = ("tf32", "fp16", "link", "fp32")  # where the terminal is narrow
NOTE = 18  # columns in which a card's full name can be read folded
NOTHING = "–"


class DeviceRow(NamedTuple):
    """A device in the table: the name to ask for it by, its figures (None: not measured yet), and what it is."""

    key: str
    figures: Figures | None
    note: str


def describe_devices(rows: Sequence[DeviceRow], width: int) -> str:
    """The table of `tightfit devices`."""

    def made(names: Sequence[str]) -> Table:
        table = table_of("device", *names, "", texts=("device", ""))
        table.columns[0].no_wrap = True  # a name that is folded cannot be typed
        for row in rows:
            cells = dict.fromkeys(COLUMNS, NOTHING) if row.figures is None else _cells(row.figures)
            table.add_row(row.key, *(cells[name] for name in names), row.note)
        return table

    table, left_out = narrowed(made, COLUMNS, FIRST_LEFT_OUT, width, NOTE)
    about = (
        "fp32 to fp16: TFLOP/s of matrix products; GB/s: of the device's memory; link: GB/s between host and device. "
        "Measured rates are those reached; published ones are peaks, of which predictions take the shares in "
        "devices/known.toml."
    )
    lines = [f"Left out, as the terminal is narrow: {', '.join(left_out)}. --json writes all."] if left_out else []
    return rendered(table, "", about, *lines, width=width)


def _cells(figures: Figures) -> dict[str, str]:
    """The cells of the columns, by their names."""
    rates = {name: figures.flops_per_second.get(dtype) for dtype, name in DTYPES.items()}
    speeds = {"GB/s": figures.memory_bytes_per_second, "link": figures.link_bytes_per_second}
    return {
        "memory": format_bytes(figures.memory_bytes),
        **{name: NOTHING if rate is None else _tera(rate) for name, rate in rates.items()},
        **{name: NOTHING if rate is None else f"{rate / 1e9:.0f}" for name, rate in speeds.items()},
    }


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.0f}" if rate >= 100e12 else f"{rate / 1e12:.3g}"


def describe_calibration(spec: DeviceSpec, path: str, width: int) -> str:
    """The figures of `tightfit calibrate`, and where they are kept."""
    if not spec.torch_version:  # published, since nothing could be measured
        size = format_bytes(spec.memory_bytes)
        return f"{spec.name}, {size}: it was not measured; published figures are used, and not kept"
    threads = f", {spec.threads} thread{'s' if spec.threads != 1 else ''}" if spec.kind == "cpu" else ""
    parts: list[Table | str] = [f"{spec.name}{threads}, torch {spec.torch_version}, {format_bytes(spec.memory_bytes)}"]
    parts += ["", _products(spec), "", _attention(spec), "", _streams(spec), "", *_overheads(spec)]
    if spec.seconds_are_rough:
        parts.append(f"{spec.seconds_are_rough[0].upper()}{spec.seconds_are_rough[1:]}.")
    return rendered(*parts, f"Kept in {path}", width=width)


def _products(spec: DeviceSpec) -> Table:
    rates = {layout: product_rates(spec, layout) for layout in LAYOUTS}
    dtypes = [dtype for dtype in DTYPES if any(dtype in found for found in rates.values())]
    table = table_of("large matrix products", *(f"{DTYPES[dtype]} GFLOP/s" for dtype in dtypes))
    for layout, meaning in LAYOUTS.items():
        found = rates[layout]
        table.add_row(meaning, *(f"{found[dtype] / 1e9:,.0f}" if dtype in found else NOTHING for dtype in dtypes))
    return table


def _attention(spec: DeviceSpec) -> Table:
    """Nanoseconds of a thousand scores, at the longest length of each width."""
    widths = sorted({point.width for points in spec.attention.values() for point in points})
    table = table_of("attention, ns for 1000 scores", *(f"head width {width}" for width in widths))
    for key, points in spec.attention.items():
        direction, mask, dtype = key.split("/")
        table.add_row(f"{direction}, {mask}, {DTYPES[dtype]}", *(_longest(points, width) for width in widths))
    return table


def _longest(points: Sequence[AttentionPoint], width: int) -> str:
    longest = max((p for p in points if p.width == width), key=lambda p: p.length)
    return f"{longest.seconds_per_score * 1e12:,.0f}"


def _streams(spec: DeviceSpec) -> Table:
    """Each family's rate on the largest tensor that was measured."""
    dtypes = [dtype for dtype in DTYPES if any(key.endswith(f"/{dtype}") for key in spec.streams)]
    table = table_of("memory-bound and elementwise", "unit", *(DTYPES[dtype] for dtype in dtypes), texts=("unit",))
    for family, unit in (STREAM_UNITS if spec.kind == "cpu" else UNITS).items():
        curves = [spec.streams.get(f"{family}/{dtype}") for dtype in dtypes]
        rates = [NOTHING if not curve else f"{curve[-1][0] / curve[-1][1] / 1e9:.3g}" for curve in curves]
        table.add_row(str(family).replace("_", " "), "GB/s" if unit is WorkUnit.BYTES else "10⁹ elements/s", *rates)
    return table


def _overheads(spec: DeviceSpec) -> list[str]:
    """The costs that are the same for every operator, and those that only one kind of device has."""
    lines = []
    if spec.kind == "cpu":
        lines.append(f"PyTorch's own time for each operator: {format_seconds(spec.framework_seconds)}.")
    else:
        lines.append(f"Launch of an operator: {format_seconds(spec.launch_seconds)}.")
    if spec.recording_seconds or spec.captured_seconds is not None:
        lines.append(
            f"The recompute executor adds {format_seconds(spec.recording_seconds)} where it notes one, "
            f"{format_seconds(spec.replaying_seconds)} where it runs one again."
        )
    if spec.captured_seconds is not None:
        lines.append(f"In a captured block: {format_seconds(spec.captured_seconds)} instead of all these.")
    if spec.fresh_threshold_bytes is not None:
        lines.append(
            f"From {format_bytes(spec.fresh_threshold_bytes)} on, memory is fresh from the system each time: "
            f"{format_seconds(spec.fresh_seconds_per_byte * 2**30)} a GiB."
        )
    for way, rate in spec.link_bytes_per_second.items():
        lines.append(f"Link, {way.replace('_', ' ').replace('/', ', ')}: {rate / 1e9:.1f} GB/s.")
    if spec.kind == "cuda":
        lines.append(f"{spec.host_assumption.capitalize()}.")
    for library, size in spec.workspace_bytes.items():
        lines.append(f"Workspace of {library.replace('_', ' ')}: {format_bytes(size)}.")
    return lines
