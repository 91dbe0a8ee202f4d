"""A trace in figures: what plans, estimates and reports show of it."""

import itertools
import zlib

from torch import nn

from tightfit.planner.plan import Footing
from tightfit.trace.record import StepTrace

TIMELINE_POINTS = 600


def footing(trace: StepTrace) -> Footing:
    """The figures of a traced step. The timeline is thinned to some hundred points, of which one is the peak
    itself.
    """
    picked = _picked(trace)
    timeline = {str(c): tuple(levels[i] for i in picked) for c, levels in trace.timeline().items()}
    at_peak = trace.peak_operator
    return Footing(
        peak_bytes=trace.peak_bytes,
        step_seconds=trace.step_seconds,
        by_category={str(c): size for c, size in trace.by_category().items()},
        phase_peaks={str(p): size for p, size in trace.phase_peaks().items()},
        seconds_by_phase={str(p): seconds for p, seconds in trace.seconds_by_phase().items()},
        peak_phase=str(at_peak.phase),
        peak_module=at_peak.module,
        peak_operator=at_peak.name,
        timeline=timeline,
        timeline_phases=tuple(str(trace.operators[i].phase) for i in picked),
    )


def _picked(trace: StepTrace) -> list[int]:
    """Of each of some hundred runs of operators, the one with the highest level."""
    count = len(trace.levels)
    runs = min(count, TIMELINE_POINTS)
    bounds = [k * count // runs for k in range(runs + 1)]
    return [max(range(a, b), key=trace.levels.__getitem__) for a, b in itertools.pairwise(bounds)]


def fingerprint(model: nn.Module) -> str:
    """Of the names, shapes, dtypes and trained-or-not of a model's parameters."""
    described = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    return f"{zlib.crc32(repr(described).encode()):08x}"
