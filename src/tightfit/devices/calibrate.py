"""Measures the device that is present, in a few seconds."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from tightfit.devices.calls import (
    AttentionCase,
    Buffers,
    ProductCase,
    StreamCase,
    attention_call,
    attention_cases,
    product_call,
    product_cases,
    smaller_attention,
    smaller_product,
    smaller_stream,
    stream_bytes,
    stream_call,
    stream_cases,
)
from tightfit.devices.cuda_figures import host_rates, link_rates, workspaces
from tightfit.devices.families import UNITS, WorkUnit
from tightfit.devices.fresh_memory import fresh_memory
from tightfit.devices.in_steps import StepTimes
from tightfit.devices.machine import device_name
from tightfit.devices.own_time import own_time
from tightfit.devices.quiet import LoadObserver
from tightfit.devices.room import NoRoom, largest_that_fits, share_of_free_memory
from tightfit.devices.spec import AttentionPoint, Curve, DeviceSpec, Kind
from tightfit.devices.timing import Call, fastest
from tightfit.errors import DeviceError
from tightfit.memory.failure import is_out_of_memory
from tightfit.runtime.outside import outside_training

SECONDS = 7.0  # for all kinds of calls together; a slow or busy device takes longer
ROUNDS = 6


@outside_training()
def calibrate(kind: Kind = "cpu") -> DeviceSpec:
    """Measure the CPU, or the current CUDA device, with the threads and precision settings now in force.

    Takes about fifteen seconds, more on a slow or busy device. Does not use the user's random generators. On a card it
    takes a quarter of the memory that is free at most (`devices.room`). Raises `DeviceError` if there is no such
    device, and `NoRoom` if that is too little for the least measurements.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda': this PyTorch finds no CUDA device: use 'cpu'")
    with share_of_free_memory() if kind == "cuda" else nullcontext():
        try:
            return _calibrated(kind)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise NoRoom from error


def _calibrated(kind: Kind) -> DeviceSpec:
    watch = LoadObserver(_probe(kind, Buffers.on(torch.device(kind))), torch.get_num_threads())
    steps = StepTimes() if kind == "cpu" else None

    def sample() -> None:
        watch.sample()
        if steps is not None:
            steps.sample()

    with torch.no_grad(), torch.autocast(kind, enabled=False):
        own = _figures_of_cpu() if kind == "cpu" else _figures_of_cuda()  # first: the allocator has nothing to reuse
        sample()
        products = _fit_products(_timed(PRODUCTS, kind), launched=kind == "cuda")
        sample()
        attention = _points(_timed(ATTENTION, kind))
        sample()
        streams = _curves(_timed(STREAMS, kind))
        sample()
    spec = DeviceSpec(
        name=device_name(kind),
        kind=kind,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        products=products,
        attention=attention,
        streams=streams,
        **own,
    )
    if steps is not None:
        spec = replace(spec, in_steps=steps.shares(spec))
    return replace(spec, disturbed_by=watch.observe().disturbed_by)


def _figures_of_cpu() -> dict[str, Any]:
    """The figures that only a CPU has: first touch of new memory, and PyTorch's own time for each operator."""
    threshold, per_byte = fresh_memory()
    return {
        "memory_bytes": psutil.virtual_memory().total,
        "fresh_threshold_bytes": threshold,
        "fresh_seconds_per_byte": per_byte,
        **_host_figures("cpu", "framework_seconds"),
    }


def _host_figures(kind: Kind, name: str) -> dict[str, float]:
    """The host's own time for an operator, by the `name` that it has on this kind of device, and the executors'."""
    own = own_time(kind)
    return {
        name: own.framework,
        "recording_seconds": own.recording,
        "replaying_seconds": own.replaying,
        "captured_seconds": own.captured,
    }


def _figures_of_cuda() -> dict[str, Any]:
    """The figures that only a CUDA device has: launches, the link to the host, and scratch memory of libraries."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "memory_bytes": properties.total_memory,
        "compute_capability": (properties.major, properties.minor),
        "sm_count": properties.multi_processor_count,
        "workspace_bytes": workspaces(),
        **_host_figures("cuda", "launch_seconds"),
        "link_bytes_per_second": link_rates(),
        **host_rates(),
        "host": "measured",
    }


def _probe(kind: Kind, buffers: Buffers) -> Call:
    """A product of about a millisecond, which one reading of the clock can time. On CUDA the call waits for it."""
    side = 256 if kind == "cpu" else 2048
    a, b, out = (buffers.get((side, side), torch.float32, use) for use in ("read", "right", "out"))

    def call() -> object:
        torch.mm(a, b, out=out)
        return torch.cuda.synchronize() if kind == "cuda" else None

    call()
    return call


class Timing(NamedTuple):
    """How one kind of calls is timed: its cases, the call of a case, a case that takes less memory, the table that a
    case belongs to, and the share of the seconds.
    """

    cases: Callable[[Kind], Iterable[Any]]
    call: Callable[[Any, Buffers], Call]
    smaller: Callable[[Any], Any]
    table: Callable[[Any], Any]
    share: float


PRODUCTS = Timing(product_cases, product_call, smaller_product, lambda case: case[:2], 0.3)
ATTENTION = Timing(attention_cases, attention_call, smaller_attention, lambda case: case[:3], 0.35)
STREAMS = Timing(stream_cases, stream_call, smaller_stream, lambda case: case[:3], 0.25)


def _timed(timing: Timing, kind: Kind) -> dict[Any, float]:
    """The least seconds of each case. On a card only the calls of one table have memory at a time, or of one case where
    that is too much, and a case that finds no room is made smaller. Raises `NoRoom` for a table without a figure.
    """
    tables: dict[Any, list[Any]] = {}
    cases = list(timing.cases(kind))
    for case in cases:
        tables.setdefault(timing.table(case) if kind == "cuda" else None, []).append(case)
    seconds: dict[Any, float] = {}
    for part in tables.values():
        share = timing.share * SECONDS / len(cases)
        calls = dict(_calls(timing, part, kind))
        if kind == "cpu" or set(calls) == set(part):
            found = fastest(calls, kind, share * len(part), ROUNDS)
        else:
            calls.clear()
            found = {}
            for case in part:
                found |= fastest(dict(_calls(timing, [case], kind)), kind, share, ROUNDS)
        if not found:
            raise NoRoom
        seconds |= found
    return seconds


def _calls(timing: Timing, cases: Sequence[Any], kind: Kind) -> Iterator[tuple[Any, Call]]:
    """The cases and their calls, which share their operands; on a card, each of a size that ran."""
    buffers = Buffers.on(torch.device(kind))

    def ran(case: Any) -> Call:
        known = set(buffers.made)
        try:
            call = timing.call(case, buffers)
            call()
        except BaseException:
            for key in set(buffers.made) - known:
                del buffers.made[key]  # a smaller case has others
            raise
        return call

    for case in cases:
        if kind == "cpu":
            yield case, timing.call(case, buffers)
        else:
            with suppress(NoRoom):
                yield largest_that_fits(case, ran, timing.smaller)


# Products


def _fit_products(seconds: dict[ProductCase, float], *, launched: bool) -> dict[str, tuple[float, ...]]:
    groups = defaultdict(dict)
    for case, spent in seconds.items():
        groups[f"{case.kind}/{_dtype_name(case.dtype)}"][case] = spent
    return {k: fit_product(list(group), list(group.values()), launched=launched) for k, group in groups.items()}


def fit_product(cases: Sequence[ProductCase], seconds: Sequence[float], *, launched: bool = False) -> tuple[float, ...]:
    """Coefficients of batch (c0 mnk + c1 mn + c2 mk + c3 nk) + c4, none below zero, of least squared relative error.

    Products that a host launches on a card take the longer of two times, which a sum fits badly: the launches of small
    products made larger ones seem to have a rate beyond any card's (1,500 to 1,800 TFLOP/s of an H200's 800, whose
    steps were then predicted up to 33% too short). So with `launched` c0 is that of the fastest product.
    """
    taken = np.array(seconds)
    terms = np.array([(*_product_terms(c), 1.0) for c in cases], dtype=float) / taken[:, None]
    whole = 1 / terms[:, 0].max() if launched else 0.0
    target = 1 - whole * terms[:, 0]
    free = range(1 if launched else 0, 5)
    best, least = np.zeros(5), float(np.square(target).sum())
    for chosen in itertools.chain.from_iterable(itertools.combinations(free, size) for size in range(1, 6)):
        columns = terms[:, chosen]
        scale = np.abs(columns).max(axis=0)
        found = np.linalg.lstsq(columns / scale, target, rcond=None)[0] / scale
        error = float(np.square(columns @ found - target).sum())
        if (found >= 0).all() and error < least:
            least, best = error, np.zeros(5)
            best[list(chosen)] = found
    best[0] += whole
    return tuple(map(float, best))


def _product_terms(case: ProductCase) -> tuple[int, int, int, int]:
    _, _, batch, m, n, k = case
    return batch * m * n * k, batch * m * n, batch * m * k, batch * n * k


# Attention


def _points(seconds: dict[AttentionCase, float]) -> dict[str, tuple[AttentionPoint, ...]]:
    tables = defaultdict(list)
    for case, spent in seconds.items():
        direction, mask = "backward" if case.backward else "forward", "causal" if case.causal else "full"
        per_score = spent / (case.heads * case.length**2)
        tables[f"{direction}/{mask}/{_dtype_name(case.dtype)}"].append(
            AttentionPoint(case.length, case.width, per_score)
        )
    return {key: tuple(points) for key, points in tables.items()}


# Streams


def _curves(seconds: dict[StreamCase, float]) -> dict[str, Curve]:
    curves = defaultdict(list)
    for case, spent in seconds.items():
        dtype = _dtype_name(case.dtype) if case.dtype == case.other else "mixed"
        size = stream_bytes(case) if UNITS[case.family] is WorkUnit.BYTES else case.elements
        curves[f"{case.family}/{dtype}"].append((float(size), spent))
    return {key: tuple(sorted(points)) for key, points in curves.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
