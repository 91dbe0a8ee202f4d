"""Reduces a trace to the figures that plans, estimates and reports show."""

import itertools
import re
import zlib

from torch import nn

from tightfit.ops.weights.low_bit import weights_in
from tightfit.planner.records import StepFigures, TensorGroup
from tightfit.tracing.copies import AWAY
from tightfit.tracing.record import Category, StepTrace, StorageRecord

TIMELINE_POINTS = 600
TOP_GROUPS = 20
_NUMBER = re.compile(r"(?<![^.])\d+(?![^. ])")  # a part of a path that is only a number: the index of a block

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def step_figures(trace: StepTrace) -> StepFigures:
    """The figures of a traced step. The timeline has at most `TIMELINE_POINTS` points, one of them the peak itself."""
    picked = _picked(trace)
    timeline = {str(c): tuple(levels[i] for i in picked) for c, levels in trace.timeline().items()}
    at_peak = trace.peak_operator
    return StepFigures(
        peak_bytes=trace.peak_bytes,
        reserved_bytes=trace.reserved_bytes,
        step_seconds=trace.step_seconds,
        host_seconds=trace.host_seconds,
        device_seconds=trace.device_seconds,
        by_category={str(c): size for c, size in trace.by_category().items()},
        host_by_category=step_host(trace),
        phase_peaks={str(p): size for p, size in trace.phase_peaks().items()},
        seconds_by_phase={str(p): seconds for p, seconds in trace.seconds_by_phase().items()},
        peak_phase=str(at_peak.phase),
        peak_module=at_peak.module,
        peak_operator=at_peak.name,
        timeline=timeline,
        timeline_phases=tuple(str(trace.operators[i].phase) for i in picked),
        timeline_operators=tuple(trace.operators[i].name for i in picked),
        timeline_modules=tuple(trace.operators[i].module for i in picked),
        top=top_groups(trace),
    )


def step_host(trace: StepTrace) -> dict[str, int]:
    """Bytes that a step has in the host's memory: on a CPU all, on a card what left it, as one micro-batch offloads."""
    if trace.reserved_bytes is None:
        return {str(category): size for category, size in trace.by_category().items()}
    held = {str(category): size for category, size in trace.host_by_category.items()}
    first, last = trace.repeated  # its backward fetches everything before the next one begins
    offloaded = sum(operator.copied_bytes for operator in trace.operators[first:last] if operator.name == AWAY)
    if offloaded:
        held[str(Category.ACTIVATION)] = held.get(str(Category.ACTIVATION), 0) + offloaded
    return held


def top_groups(trace: StepTrace) -> tuple[TensorGroup, ...]:
    """The largest groups of tensors at the peak. Tensors whose names differ only in a block's number form one group."""
    members: dict[tuple, list[StorageRecord]] = {}
    for storage in trace.alive_at(trace.peak_index):
        maker = None if storage.operator is None else trace.operators[storage.operator]
        operator = "" if maker is None else maker.name
        key = (_NUMBER.sub("*", _name(trace, storage)), operator, str(storage.category), storage.shape, storage.dtype)
        members.setdefault(key, []).append(storage)
    groups = [
        TensorGroup(
            name=name if len(storages) > 1 else _name(trace, storages[0]),
            operator=operator,
            category=category,
            shape=tuple(shape),
            dtype=dtype,
            count=len(storages),
            bytes=sum(storage.bytes for storage in storages),
        )
        for (name, operator, category, shape, dtype), storages in members.items()
    ]
    at_peak = trace.peak_operator
    scratch = int(at_peak.workspace_bytes)
    if scratch:
        groups.append(TensorGroup(at_peak.module, at_peak.name, str(Category.WORKSPACE), (), "", 1, scratch))
    return tuple(sorted(groups, key=lambda group: -group.bytes)[:TOP_GROUPS])


def _name(trace: StepTrace, storage: StorageRecord) -> str:
    """The name of a parameter, a gradient or a state, else the path of the module that allocated the storage."""
    if storage.name or storage.operator is None:
        return storage.name
    return trace.operators[storage.operator].module


def _picked(trace: StepTrace) -> list[int]:
    """Indices of at most `TIMELINE_POINTS` operators: the one with the highest level in each of as many equal runs."""
    count = len(trace.levels)
    runs = min(count, TIMELINE_POINTS)
    bounds = [k * count // runs for k in range(runs + 1)]
    return [max(range(a, b), key=trace.levels.__getitem__) for a, b in itertools.pairwise(bounds)]


def dtypes_of(model: nn.Module) -> str:
    """The dtypes of the parameters, the one with the most elements first: `bf16`, or `bf16 and fp32`."""
    elements: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        name = _SHORT.get(name, name) if getattr(parameter, "quant_state", None) is None else "nf4"
        elements[name] = elements.get(name, 0) + weights_in(parameter)
    return " and ".join(sorted(elements, key=lambda name: -elements[name]))


def fingerprint(model: nn.Module) -> str:
    """A checksum over the names, shapes, dtypes and `requires_grad` of a model's parameters."""
    described = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    return f"{zlib.crc32(repr(described).encode()):08x}"
