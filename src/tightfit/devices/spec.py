"""What a device can do, as measured figures: plain data that can be printed, compared and written as JSON."""

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

    `shares`: of a rate of the card, by kind of kernel: `"product/half"` (`"/tf32"`, `"/float32"`) and
    `"attention/forward"` (`"/backward"`) of its arithmetic, `"product/unaligned"` of a product's own share, all others
    of its memory's rate.

    `kernel_seconds`: from one kernel to the next, beside its work; `launch_seconds`: of the host, for an operator.
    `tile_depth`: what a product's tile takes beside its own depth, and `ramp_depth` what one on every multiprocessor
    takes at the beginning and the end, both as a depth. `attention_ramp`: keys that each query costs beside those it
    sees; `exponential_width`: what a score costs beside its products, as a width of heads.
    `pick_seconds`: for each number that a loss picks; `scatter_seconds`: for sorting the indexes of what is scattered.
    `long_row_bytes`: of a row that a softmax has to read more than once.
    """

    shares: Mapping[str, float]
    kernel_seconds: float
    launch_seconds: float
    tile_depth: float
    ramp_depth: float
    attention_ramp: float
    exponential_width: float
    pick_seconds: float
    scatter_seconds: float
    long_row_bytes: float


@dataclass(frozen=True)
class Roofline:
    """Published rates of a device, and how kernels use them.

    `flops_per_second` by dtype: `"float32"`, `"tf32"`, `"bfloat16"`, `"float16"`; a dtype without units of its own is
    missing. Bytes in bytes, times in seconds.
    """

    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    link_bytes_per_second: float
    sm_count: int
    kernels: Kernels

    def rate(self, dtype: str, tf32: bool) -> float:
        """FLOP/s of products in a dtype (`"mixed"` is computed in float32)."""
        key = "tf32" if tf32 and dtype in ("float32", "mixed") else dtype
        return self.flops_per_second.get(key, self.flops_per_second["float32"])


@dataclass(frozen=True)
class DeviceSpec:
    """A device and its figures. All times in seconds, all sizes in bytes unless said otherwise.

    A device that was calibrated has `products`, `attention` and `streams`; one that is known from its maker's papers
    only has a `roofline`. `compute_capability` and `sm_count` (multiprocessors) are those of CUDA, None on a CPU.

    The keys of the tables end in a dtype (`"float32"`, `"bfloat16"`, `"float16"`; `"mixed"` where they differ).

    `products["nt/float32"]`: the coefficients c of t = c0 mnk + c1 mn + c2 mk + c3 nk + c4 for one product
    (m, k) x (k, n), the second side transposed; `products["batched/float32"]`: the same for each of a batch of
    products, c4 for the whole call.
    `attention["forward/causal/float32"]`: points over lengths and widths.
    `streams["arithmetic/float32"]`: seconds against bytes moved or elements, as the family counts.
    `fresh_threshold_bytes`: outputs from this size on are taken from the system each time and cost
    `fresh_seconds_per_byte` for first touch and release; None where the allocator keeps what it has.
    `framework_seconds`: what PyTorch takes for each operator beside its kernel, where the device waits for it (a CPU);
    `recording_seconds`, `replaying_seconds`: what is added to that where the recompute executor notes an operator, and
    where it runs it again.
    `launch_seconds`: on CUDA, what a launch takes eager PyTorch; no kernel's price is below it.
    `workspace_bytes`: on CUDA, scratch memory that was seen to be taken, by library (`"cublas"`, `"attention"`).
    `link_bytes_per_second`: between host and device, by kind of host memory (`"pinned"`, `"pageable"`).
    `disturbed_by`: what kept the device busy while it was measured; empty where it was quiet.
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
    compute_capability: tuple[int, int] | None = None
    sm_count: int | None = None
    roofline: Roofline | None = None
    launch_seconds: float = 0.0
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    link_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    disturbed_by: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether the figures were measured on the device, not read from its maker's papers."""
        return self.roofline is None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "DeviceSpec":
        """The inverse of `to_dict`. Raises `DeviceError` where a figure is missing, unknown or not a finite number."""
        try:
            if missing := {field.name for field in fields(cls)} - set(data):
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
        """Read what `to_json` wrote. Raises `DeviceError` where the file is missing or is not a spec."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DeviceError(f"{path}: not a readable device spec ({error}): calibrate the device again") from error
        if not isinstance(data, dict):
            raise DeviceError(f"{path}: not a device spec but a {type(data).__name__}: calibrate the device again")
        return cls.from_dict(data)


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
        *points,
        *curves,
        *coefficients,
        spec.launch_seconds,
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
