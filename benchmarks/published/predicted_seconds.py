"""What the law of a card predicts for published rows, in the terms in which they were measured."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.devices.clocks import Clocks, clocks_of
from tightfit.devices.known import find
from tightfit.devices.roofline import ZEROS, RooflineLaw
from tightfit.devices.spec import Roofline
from tightfit.devices.work import Work

# `triton.testing.do_bench` writes zeros to so much memory before each call: while the card does, the host runs ahead.
FLUSHED_BYTES = 256 * 2**20


def roofline_of(row: dict[str, Any]) -> Roofline:
    """The published rates of a row's card, and how kernels use them."""
    device = find(row["card"])
    if device is None or device.spec.roofline is None:
        raise ValueError(f"{row['id']}: {row['card']} is not a known card")
    return device.spec.roofline


@contextmanager
def matmul_precision(row: dict[str, Any]) -> Iterator[None]:
    """PyTorch's own setting, as in the run that was published."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if row["config"].get("tf32") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def clock_seconds(row: dict[str, Any], work: Counter[Work], roofline: Roofline) -> Clocks:
    """Seconds in which the host launches a row's operators, and in which the device runs their kernels."""
    with matmul_precision(row):
        law = RooflineLaw(roofline)
    clocks = [(count, clocks_of(law.seconds(kind))) for kind, count in work.items()]
    return Clocks(sum(count * each.host for count, each in clocks), sum(count * each.device for count, each in clocks))


def predicted(row: dict[str, Any], work: Counter[Work], roofline: Roofline, *, two_clocks: bool = False) -> float:
    """Seconds of a row: of a step as tightfit states them, of an operator as its benchmark times it.

    With `two_clocks`, a step takes as long as the later of the host's launches and the device's kernels.
    """
    with matmul_precision(row):
        law = RooflineLaw(roofline)
    if row["kind"] == "step" and two_clocks:
        return max(clock_seconds(row, work, roofline))
    if row["kind"] == "step":
        return sum(count * law.seconds(kind) for kind, count in work.items())
    device = sum(count * law.kernel_seconds(kind) for kind, count in work.items())
    host = sum(count * law.host_seconds(kind) for kind, count in work.items() if law.kernel_seconds(kind))
    ahead = FLUSHED_BYTES / (roofline.memory_bytes_per_second * roofline.kernels.shares[ZEROS])
    return max(device, host - ahead)
