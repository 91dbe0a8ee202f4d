"""A device's figures: plain data that can be printed, compared and written as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tightfit.errors import DeviceError

Kind = Literal["cpu", "cuda"]
Curve = tuple[tuple[float, float], ...]  # (size, seconds), sizes rising


@dataclass(frozen=True)
class AttentionPoint:
    """Seconds per score (one head, one query, one key) at a sequence length and head width."""

    length: int
    width: int
    seconds_per_score: float


@dataclass(frozen=True)
class Kernels:
    """How PyTorch's kernels use the cards of one kind.

    - `shares`: the share of a card's rate that each kind of kernel reaches. `"product/half"` (`"/tf32"`, `"/float32"`)
      and `"attention/forward"` (`"/backward"`) are shares of arithmetic, `"product/unaligned"` is a share of a
      product's own share, and all others are shares of the memory's rate.
    - `kernel_seconds`: the fixed time of each kernel. `launch_seconds`: the host's time for an operator,
      and `product_calls` that for a product, as a number of operators.
    - `tile_depth`: the fixed cost of a product's tile, and `ramp_depth` that of a tile on every multiprocessor at the
      beginning and the end, both as a depth.
    - `attention_ramp`: the fixed cost of each query, as a number of keys. `exponential_width`: the cost of a score
      besides its products, as a width of heads.
    - `pick_seconds`: for each number that a loss picks. `scatter_seconds`: for sorting the indices of a scatter.
    - `block_row_seconds`: for a row that a softmax gives to a block of threads, on one multiprocessor.
    - `long_row_bytes`: the size from which on a softmax reads a row more than once.
    """

    shares: Mapping[str, float]
    kernel_seconds: float
    launch_seconds: float
    product_calls: float
    tile_depth: float
    ramp_depth: float
    attention_ramp: float
    exponential_width: float
    pick_seconds: float
    scatter_seconds: float
    block_row_seconds: float
    long_row_bytes: float


@dataclass(frozen=True)
class Roofline:
    """Published rates of a device, and how kernels use them.

    `flops_per_second` by dtype: `"float32"`, `"tf32"`, `"bfloat16"`, `"float16"`. A dtype without its own units is
    missing. Sizes are in bytes, times in seconds.
    """

    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    link_bytes_per_second: float
    sm_count: int
    kernels: Kernels
    peer_bytes_per_second: float = 0.0  # to other cards of a node, in one direction; 0: over the link to the host

    def rate(self, dtype: str, tf32: bool) -> float:
        """FLOP/s of products in a dtype (`"mixed"` is computed in float32)."""
        key = "tf32" if tf32 and dtype in ("float32", "mixed") else dtype
        return self.flops_per_second.get(key, self.flops_per_second["float32"])


# Bytes per second at which a card's host works in its own memory, in several threads, where nobody said which host it
# is: 56% of what two channels of DDR5-5600 move, as desktop machines have them. Assumed; nothing was measured.
HOST_BYTES_PER_SECOND = 50e9
DRIVE_BYTES_PER_SECOND = 3e9  # of an NVMe drive that is read in order, where nothing is known of it


@dataclass(frozen=True)
class DeviceSpec:
    """A device and its figures. All times are in seconds, all sizes in bytes, unless said otherwise.

    A calibrated device has `products`, `attention` and `streams`. A device known only from published figures has a
    `roofline`. `compute_capability` and `sm_count` (multiprocessors) are those of CUDA, None on a CPU. The keys of the
    tables end in a dtype (`"float32"`, `"bfloat16"`, `"float16"`, or `"mixed"`).

    - `products["nt/float32"]`: the coefficients c of t = c0 mnk + c1 mn + c2 mk + c3 nk + c4 for one product
      (m, k) x (k, n) with the second side transposed. `products["batched/float32"]`: the same for each of a batch of
      products, with c4 for the whole call.
    - `attention["forward/causal/float32"]`: points over lengths and widths.
    - `streams["arithmetic/float32"]`: seconds against moved bytes or elements, depending on the family's unit.
    - `fresh_threshold_bytes`: outputs from this size on are new memory from the system each time, and cost
      `fresh_seconds_per_byte` for first touch and release; None if the allocator keeps freed memory.
    - `framework_seconds`: PyTorch's own time for each operator on a CPU, without the kernel. The recompute executor
      adds `recording_seconds` of the host if it records the operator, and `replaying_seconds` if it replays it. In the
      program of a captured block an operator takes `captured_seconds` instead of all these, and on a card instead of
      a launch (None: not measured).
    - `in_steps`: how many times its own seconds an operator takes within a training step, for `"float32"` and for
      `"half"` (16 bits, or 16 and 32); 1 where a figure is missing.
    - `launch_seconds`: on CUDA, the host's time for each operator of a model in eager PyTorch, the launch and the views
      and modules around it. No kernel's price is below it.
    - `workspace_bytes`: on CUDA, the measured scratch memory, by library (`"cublas"`, `"attention"`).
    - `link_bytes_per_second`: between host and device, by kind of host memory (`"pinned"`, `"pageable"`).
    - `disturbed_by`: the load during the measurement; empty if the device was quiet.
    - `host_bytes_per_second`: on CUDA, how fast the host works in its own memory: an update of weights there. `host`
      says whose figure that is; empty: assumed. `host_update_bytes_per_second` is that of a fused update, if measured.
    - `drive_bytes_per_second`: how fast the host's drive is read, as somebody said it; None: nobody did.
    - `scaled_from`: whose figures these are, where the present device was not measured yet; else empty.
    """

    name: str
    kind: Kind
    memory_bytes: int
    torch_version: str = ""
    threads: int = 0
    products: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    attention: Mapping[str, tuple[AttentionPoint, ...]] = field(default_factory=dict)
    streams: Mapping[str, Curve] = field(default_factory=dict)
    fresh_threshold_bytes: int | None = None
    fresh_seconds_per_byte: float = 0.0
    framework_seconds: float = 0.0
    recording_seconds: float = 0.0
    replaying_seconds: float = 0.0
    captured_seconds: float | None = None
    in_steps: Mapping[str, float] = field(default_factory=dict)
    compute_capability: tuple[int, int] | None = None
    sm_count: int | None = None
    roofline: Roofline | None = None
    launch_seconds: float = 0.0
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    link_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    disturbed_by: str = ""
    scaled_from: str = ""
    host_bytes_per_second: float = HOST_BYTES_PER_SECOND
    host: str = ""
    drive_bytes_per_second: float | None = None
    host_update_bytes_per_second: float | None = None

    @property
    def host_seconds(self) -> float:
        """The host's own time for each operator of eager PyTorch: a launch, or on a CPU what is no kernel."""
        if self.kind == "cpu":
            return self.framework_seconds
        return self.launch_seconds if self.roofline is None else self.roofline.kernels.launch_seconds

    @property
    def host_assumption(self) -> str:
        """The sentence about the host's rate."""
        rate = f"{self.host_bytes_per_second / 1e9:.0f} GB/s"
        return f"the host works in its memory at {rate} ({self.host or 'assumed; --host says another'})"

    @property
    def seconds_are_rough(self) -> str:
        """The sentence that predicted seconds are rough, and why; empty if they are not."""
        if self.scaled_from:
            return (
                f"predicted seconds are rough: {self.name} was not measured yet and has {self.scaled_from}; the next "
                "training measures it, or `tightfit calibrate` does (about 15 seconds)"
            )
        if self.disturbed_by:
            return f"predicted seconds are rough: while {self.name} was measured, {self.disturbed_by}"
        return ""

    @property
    def is_measured(self) -> bool:
        """True if the figures were measured on the device, and not published by its maker."""
        return self.roofline is None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "DeviceSpec":
        """The inverse of `to_dict`. Raises `DeviceError` if a figure is missing, unknown or not a finite number."""
        try:
            if missing := {field.name for field in fields(cls)} - set(data) - _LATER:
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
            spec = cls(
                **{
                    **data,
                    "products": {key: tuple(map(float, c)) for key, c in data["products"].items()},
                    "attention": {k: tuple(AttentionPoint(**p) for p in ps) for k, ps in data["attention"].items()},
                    "streams": {k: tuple((float(x), float(s)) for x, s in c) for k, c in data["streams"].items()},
                    "compute_capability": _pair(data.get("compute_capability")),
                    "roofline": None if data.get("roofline") is None else _roofline(data["roofline"]),
                }
            )
            sound = all(math.isfinite(figure) and figure >= 0 for figure in _figures(spec))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DeviceError(f"device spec: {error}: calibrate the device again") from error
        if not sound or spec.kind not in ("cpu", "cuda"):
            raise DeviceError(
                f"device spec of {spec.name!r}: a figure is not a finite number: calibrate the device again"
            )
        return spec

    def to_json(self, path: str | Path) -> None:
        """Write the spec as one JSON object."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> "DeviceSpec":
        """Read a file that `to_json` wrote. Raises `DeviceError` if it is missing or not a spec."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DeviceError(f"{path}: not a readable device spec ({error}): calibrate the device again") from error
        if not isinstance(data, dict):
            raise DeviceError(f"{path}: not a device spec but a {type(data).__name__}: calibrate the device again")
        return cls.from_dict(data)


_LATER = frozenset(
    {
        "captured_seconds",
        "in_steps",
        "scaled_from",
        "host_bytes_per_second",
        "host",
        "drive_bytes_per_second",
        "host_update_bytes_per_second",
    }
)  # figures that files of earlier versions lack


def _roofline(data: Mapping[str, Any]) -> Roofline:
    return Roofline(**{**data, "kernels": Kernels(**data["kernels"])})


def _pair(capability: Any) -> tuple[int, int] | None:
    if capability is None:
        return None
    major, minor = capability
    return int(major), int(minor)


def _figures(spec: DeviceSpec) -> list[float]:
    points = [figure for table in spec.attention.values() for point in table for figure in asdict(point).values()]
    curves = [figure for curve in spec.streams.values() for point in curve for figure in point]
    coefficients = [figure for table in spec.products.values() for figure in table]
    return [
        spec.memory_bytes,
        spec.threads,
        spec.fresh_seconds_per_byte,
        spec.framework_seconds,
        spec.recording_seconds,
        spec.replaying_seconds,
        *((spec.captured_seconds,) if spec.captured_seconds is not None else ()),
        *spec.in_steps.values(),
        *points,
        *curves,
        *coefficients,
        spec.launch_seconds,
        spec.host_bytes_per_second,
        *(rate for rate in (spec.drive_bytes_per_second, spec.host_update_bytes_per_second) if rate is not None),
        *spec.workspace_bytes.values(),
        *spec.link_bytes_per_second.values(),
        *((spec.sm_count,) if spec.sm_count is not None else ()),
        *(_roofline_figures(spec.roofline) if spec.roofline is not None else ()),
    ]


def _roofline_figures(roofline: Roofline) -> list[float]:
    figures = asdict(roofline)
    kernels = figures.pop("kernels")
    return [
        *figures.pop("flops_per_second").values(), *figures.values(), *kernels.pop("shares").values(), *kernels.values()
    ]  # fmt: skip
