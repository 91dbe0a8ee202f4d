"""Measures the device that is present, in a few seconds."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
    stream_bytes,
    stream_call,
    stream_cases,
)
from tightfit.devices.cuda_figures import launch_seconds, link_rates, workspaces
from tightfit.devices.families import STREAM_UNITS, Unit
from tightfit.devices.fresh_memory import fresh_memory
from tightfit.devices.in_steps import StepTimes
from tightfit.devices.machine import device_name
from tightfit.devices.own_time import own_time
from tightfit.devices.quiet import LoadObserver
from tightfit.devices.spec import AttentionPoint, Curve, DeviceSpec, Kind
from tightfit.devices.timing import Call, fastest
from tightfit.errors import DeviceError
from tightfit.runtime.activity import aside

SECONDS = 7.0  # for all kinds of calls together; a slow or busy device takes longer
ROUNDS = 6


@aside()
def calibrate(kind: Kind = "cpu") -> DeviceSpec:
    """Measure the CPU, or the current CUDA device, with the threads and precision settings now in force.

    Takes about fifteen seconds, more on a slow or busy device. Does not use the user's random generators. Raises
    `DeviceError` if there is no such device.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda': this PyTorch finds no CUDA device: use 'cpu'")
    here = torch.device(kind)
    watch = LoadObserver(_probe(kind, Buffers.on(here)), torch.get_num_threads())
    steps = StepTimes() if kind == "cpu" else None

    def sample() -> None:
        watch.sample()
        if steps is not None:
            steps.sample()

    with torch.no_grad(), torch.autocast(kind, enabled=False):
        own = _figures_of_cpu() if kind == "cpu" else _figures_of_cuda()  # first: the allocator has nothing to reuse
        sample()
        products = _fit_products(_time_products(kind, Buffers.on(here)))
        sample()
        attention = _points(_time_attention(kind, Buffers.on(here)))
        sample()
        streams = _curves(_time_streams(kind, Buffers.on(here)))
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
    own = own_time()
    return {
        "memory_bytes": psutil.virtual_memory().total,
        "fresh_threshold_bytes": threshold,
        "fresh_seconds_per_byte": per_byte,
        "framework_seconds": own.framework,
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
        "launch_seconds": launch_seconds(),
        "link_bytes_per_second": link_rates(),
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


# Products


def _time_products(kind: Kind, buffers: Buffers) -> dict[ProductCase, float]:
    return fastest({c: product_call(c, buffers) for c in product_cases(kind)}, kind, 0.3 * SECONDS, ROUNDS)


def _fit_products(seconds: dict[ProductCase, float]) -> dict[str, tuple[float, ...]]:
    groups = defaultdict(dict)
    for case, spent in seconds.items():
        groups[f"{case.kind}/{_dtype_name(case.dtype)}"][case] = spent
    return {key: fit_product(list(group), list(group.values())) for key, group in groups.items()}


def fit_product(cases: Sequence[ProductCase], seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of batch (c0 mnk + c1 mn + c2 mk + c3 nk) + c4, none below zero, of least squared relative error."""
    terms = np.array([(*_product_terms(c), 1.0) for c in cases], dtype=float) / np.array(seconds)[:, None]
    best, least = np.zeros(5), np.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(5), size) for size in range(1, 6)):
        columns = terms[:, chosen]
        scale = np.abs(columns).max(axis=0)
        found = np.linalg.lstsq(columns / scale, np.ones(len(cases)), rcond=None)[0] / scale
        error = float(np.square(columns @ found - 1).sum())
        if (found >= 0).all() and error < least:
            least, best = error, np.zeros(5)
            best[list(chosen)] = found
    return tuple(map(float, best))


def _product_terms(case: ProductCase) -> tuple[int, int, int, int]:
    _, _, batch, m, n, k = case
    return batch * m * n * k, batch * m * n, batch * m * k, batch * n * k


# Attention


def _time_attention(kind: Kind, buffers: Buffers) -> dict[AttentionCase, float]:
    return fastest({c: attention_call(c, buffers) for c in attention_cases(kind)}, kind, 0.35 * SECONDS, ROUNDS)


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


def _time_streams(kind: Kind, buffers: Buffers) -> dict[StreamCase, float]:
    return fastest({c: stream_call(c, buffers) for c in stream_cases(kind)}, kind, 0.25 * SECONDS, ROUNDS)


def _curves(seconds: dict[StreamCase, float]) -> dict[str, Curve]:
    curves = defaultdict(list)
    for case, spent in seconds.items():
        dtype = _dtype_name(case.dtype) if case.dtype == case.other else "mixed"
        size = stream_bytes(case) if STREAM_UNITS[case.family] is Unit.BYTES else case.elements
        curves[f"{case.family}/{dtype}"].append((float(size), spent))
    return {key: tuple(sorted(points)) for key, points in curves.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
