"""The picture of a memory record: the traced step by category, and the counters over the whole training."""

import io
import itertools
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError
from tightfit.planner.records import StepFigures
from tightfit.planner.report.picture import INSTALL_HINT, PHASE_TINTS, stack_categories
from tightfit.training.monitoring.recorded import RecordedTraining, Sample
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, DOTS = 12.0, 7.0, 100  # inches and dots per inch: 1200 by 700
HEADROOM = 1.25  # above the highest point, for the peak's label and the names of the phases
LEAST_LABELLED = 0.06  # share of the panel's width that a phase needs for its name to be legible
RESIDENT, ALLOCATED, RESERVED = "#000000", "#0072B2", "#56B4E9"


def record_picture(record: RecordedTraining) -> bytes:
    """A PNG, 1200 pixels wide. Raises `InputError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # opens no window, whatever the user's backend
    except ImportError as error:
        raise InputError(f"the picture needs the package matplotlib: {INSTALL_HINT}") from error
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(3, 2)) if record.traced is not None else [figure.subplots()]
    if record.traced is not None:
        _draw_step(panels[0], record, record.traced)
    _draw_samples(panels[-1], record.samples)
    name = record.model or "no model"
    figure.suptitle(f"Memory of {name}: peak {format_bytes(record.peak_bytes)} ({record.peak_source})", fontsize=13)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DOTS)
    return image.getvalue()


def _draw_step(axis: "Axes", record: RecordedTraining, step_figures: StepFigures) -> None:
    unit, divisor = _unit(step_figures.peak_bytes)
    stack_categories(axis, step_figures, divisor)
    levels = [sum(sizes) for sizes in zip(*step_figures.timeline.values(), strict=True)]
    at = levels.index(max(levels))
    last = max(len(levels) - 1, 1)
    axis.annotate(
        f"peak {format_bytes(step_figures.peak_bytes)} in {step_figures.peak_phase}, "
        f"{step_figures.peak_module or 'top level'}",
        (at, step_figures.peak_bytes / divisor),
        xytext=(0, 6),
        textcoords="offset points",
        ha="left" if at < last / 3 else "right" if at > 2 * last / 3 else "center",
        va="bottom",
    )
    _shade(axis, step_figures.timeline_phases)
    axis.set_xlim(0, last)
    axis.set_ylim(0, HEADROOM * step_figures.peak_bytes / divisor)
    axis.set_xticks([])
    axis.set_ylabel(f"in use ({unit})")
    ended = "" if record.complete else ", which did not end"
    axis.set_title(f"Step {record.traced_step}{ended}: its operators in the order in which they ran")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _shade(axis: "Axes", phases: tuple[str, ...]) -> None:
    """Shade each phase in its tint, and name it if it is wide enough."""
    start = 0
    for phase, run in itertools.groupby(phases):
        end = start + len(list(run))
        axis.axvspan(start, end, color=PHASE_TINTS[phase], zorder=0, linewidth=0)
        if end - start >= LEAST_LABELLED * len(phases):
            axis.text((start + end) / 2, 0.98, phase, transform=axis.get_xaxis_transform(), ha="center", va="top")
        start = end


def _draw_samples(axis: "Axes", samples: tuple[Sample, ...]) -> None:
    seconds = [sample.seconds for sample in samples]
    lines: list[tuple[str, str, list[Any]]] = [
        ("resident memory", RESIDENT, [s.rss_bytes for s in samples]),
        ("allocated on the device", ALLOCATED, [s.allocated_bytes for s in samples]),
        ("reserved on the device", RESERVED, [s.reserved_bytes for s in samples]),
    ]
    lines = [line for line in lines if all(size is not None for size in line[2])]
    highest = max((size for _, _, sizes in lines for size in sizes), default=0)
    unit, divisor = _unit(highest)
    for name, colour, sizes in lines:
        axis.plot(
            seconds, [size / divisor for size in sizes], ".-", color=colour, linewidth=1, markersize=4, label=name
        )
    axis.set_ylim(0, HEADROOM * max(highest, 1) / divisor)
    axis.set_xlabel("seconds since the monitoring began; one point at the end of each phase")
    axis.set_ylabel(unit)
    axis.set_title("The whole training")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _unit(size: int) -> tuple[str, int]:
    """The unit of an axis, and its bytes."""
    return ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)
