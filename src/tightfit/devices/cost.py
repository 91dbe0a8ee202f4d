"""Predicts the seconds of an operator from its work and the device's figures."""

import bisect
from collections.abc import Sequence
from typing import Any, Protocol

from tightfit.devices.clocks import Seconds
from tightfit.devices.families import UNITS, Family, WorkUnit, base_name
from tightfit.devices.roofline import RooflineLaw
from tightfit.devices.spec import AttentionPoint, Curve, DeviceSpec
from tightfit.devices.work import (
    ALIGNED_BYTES,
    HALVES,
    AttentionShape,
    CostedTensor,
    ProductShape,
    Work,
    is_aligned,
    work_of,
)
from tightfit.runtime.simulation import simulation

# The dtype whose figures replace those of a dtype that was not measured for a family.
_STAND_INS = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "mixed": ("mixed", "bfloat16", "float16", "float32"),
}


UNALIGNED = "unaligned-"  # before the layout of products whose rows do not begin at multiples of a vector load
ELEMENT_BY_ELEMENT = {Family.ARITHMETIC, Family.TRANSCENDENTAL, Family.ERROR_FUNCTION, Family.COPY}


class Law(Protocol):
    """Predicts seconds of work on one device."""

    def seconds(self, work: Work) -> float: ...


class CostModel:
    """Predicts the seconds of operators on one device, from measured figures or else from published rates."""

    def __init__(self, spec: DeviceSpec):
        self.spec = spec
        self.law: Law = MeasuredLaw(spec) if spec.roofline is None else RooflineLaw(spec.roofline)

    def operator_seconds(
        self,
        name: str,
        inputs: Sequence[CostedTensor],
        outputs: Sequence[CostedTensor],
        arguments: tuple[Any, ...] = (),
    ) -> float:
        """Predicted seconds of one call of the operator `name` (`"aten.mm.default"`). Views cost nothing.

        `inputs` and `outputs` are the shapes of all input and output tensors. `arguments` are the positional arguments
        that are not tensors (a causal flag, an exponent, lists of tensors).
        """
        work = work_of(name, inputs, outputs, arguments)
        if simulation.host and simulation.of_cuda:
            moved = 0 if work.family is Family.FREE else work.bytes
            measured = self.spec.host_update_bytes_per_second if base_name(name).startswith("_fused_adam") else None
            return Seconds.of(host=moved / (measured or self.spec.host_bytes_per_second), device=0.0)
        return self.seconds(work)

    def seconds(self, work: Work) -> float:
        """Predicted seconds of this work."""
        return self.law.seconds(work)


class MeasuredLaw:
    """Prices the work of operators by the calibrated figures of a device; keeps nothing between calls."""

    def __init__(self, spec: DeviceSpec):
        self.spec = spec

    def seconds(self, work: Work) -> float:
        """Predicted seconds of this work, first touch of large outputs included."""
        if work.family is Family.FREE or work.elements == 0:
            return 0.0
        if work.products:
            seconds = sum(self._product(product, work.dtype) for product in work.products)
        elif work.attention is not None:
            seconds = self._attention(work.attention, work.family is Family.ATTENTION_BACKWARD, work.dtype)
        else:
            seconds = self._stream(work)
        seconds += self._first_touch(work.fresh_bytes) + self.spec.framework_seconds
        seconds *= self.spec.in_steps.get(work.precision, 1.0)
        launch = self.spec.launch_seconds
        return Seconds.of(host=launch, device=seconds) if launch else seconds

    def _figure(self, table: Any, prefix: str, dtype: str) -> Any:
        for stand_in in _STAND_INS[dtype]:
            found = table.get(f"{prefix}/{stand_in}")
            if found is not None:
                return found
        raise KeyError(f"{self.spec.name} has no figure for {prefix} in {dtype}")

    def _product(self, product: ProductShape, dtype: str) -> float:
        batch, m, n, k, layout = product
        kind = layout if batch == 1 else "batched"
        if dtype in HALVES and not is_aligned(product, ALIGNED_BYTES // 2):
            apart = f"{UNALIGNED}{kind}"
            kind = apart if f"{apart}/{dtype}" in self.spec.products else kind
        whole, result, left, right, call = self._figure(self.spec.products, kind, dtype)
        return batch * (whole * m * n * k + result * m * n + left * m * k + right * n * k) + call

    def _attention(self, attention: AttentionShape, backward: bool, dtype: str) -> float:
        prefix = f"{'backward' if backward else 'forward'}/{'causal' if attention.causal else 'full'}"
        points = self._figure(self.spec.attention, prefix, dtype)
        length = (attention.query_length * attention.key_length) ** 0.5
        return attention.scores * _per_score(points, length, attention.width)

    def _stream(self, work: Work) -> float:
        if work.family in ELEMENT_BY_ELEMENT and not work.even and f"{Family.UNEVEN}/float32" in self.spec.streams:
            return max(self._curve(work, Family.UNEVEN), self._even(work))
        return self._even(work)

    def _even(self, work: Work) -> float:
        """Seconds of a kernel that goes through its tensors as one line."""
        widens = work.widens and f"{Family.WIDENING}/mixed" in self.spec.streams
        family = Family.WIDENING if widens else work.family
        seconds = self._curve(work, family)
        if UNITS[family] is WorkUnit.BYTES:
            return seconds
        # No operator is faster than reading and writing its bytes, however few instructions it has.
        floor = self._figure(self.spec.streams, Family.ARITHMETIC, "float32")
        return max(seconds, interpolate(floor, work.bytes))

    def _curve(self, work: Work, family: Family) -> float:
        size = work.bytes if UNITS[family] is WorkUnit.BYTES else work.elements
        return interpolate(self._figure(self.spec.streams, family, work.dtype), size)

    def _first_touch(self, fresh_bytes: tuple[int, ...]) -> float:
        threshold = self.spec.fresh_threshold_bytes
        if threshold is None:
            return 0.0
        return self.spec.fresh_seconds_per_byte * sum(size for size in fresh_bytes if size >= threshold)


def interpolate(curve: Curve, size: float) -> float:
    """Seconds at a size: straight lines between the points, proportional beyond the last, constant before the first."""
    sizes = [point[0] for point in curve]
    after = bisect.bisect_left(sizes, size)
    if after == 0:
        return curve[0][1]
    if after == len(curve):
        return curve[-1][1] * size / curve[-1][0]
    (x0, y0), (x1, y1) = curve[after - 1], curve[after]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def _per_score(points: Sequence[AttentionPoint], length: float, width: int) -> float:
    """Seconds per score (a softmax and two products of a width), interpolated between widths and lengths."""
    widths = sorted({point.width for point in points})
    at_width = [
        interpolate(tuple(sorted((p.length, p.seconds_per_score * p.length) for p in points if p.width == w)), length)
        for w in widths
    ]
    above = min(max(bisect.bisect_left(widths, width), 1), len(widths) - 1) if len(widths) > 1 else 0
    low, high = at_width[above - 1] if above else at_width[0], at_width[above]
    slope = (high - low) / (widths[above] - widths[above - 1]) if above else 0.0
    start = widths[above - 1] if above else width
    # Half of the narrowest: no width makes the softmax cheaper than that.
    return max(low + slope * (width - start), at_width[0] / 2) / length
