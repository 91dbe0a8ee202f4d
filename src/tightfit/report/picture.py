"""memory.png: the memory of one training step, plain beside planned, by category."""

import io
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError
from tightfit.planner.records import Footing
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL_HINT = "pip install 'tightfit[report]'"
# Okabe and Ito's palette, told apart with any colour vision ("Color Universal Design", 2008). From the bottom: what is
# always there, then what comes and goes.
COLOURS = {
    "parameters": "#0072B2",
    "optimizer states": "#56B4E9",
    "gradients": "#009E73",
    "inputs": "#999999",
    "activations": "#E69F00",
    "workspace": "#CC79A7",
}
BUDGET_COLOUR, MEASURED_COLOUR = "#D55E00", "#000000"
# Behind the stack, pale versions of nothing in it.
PHASE_TINTS = {"forward": "#FFFFFF", "recompute": "#CFE8F7", "backward": "#EDEDED", "optimizer": "#FFFFFF"}
HEADROOM = 1.3  # above the highest bar: for its label and the names of the phases
WIDTH, HEIGHT, DOTS = 12.0, 6.0, 100  # inches and dots per inch: 1200 by 600
LEGEND_COLUMNS = 5
LEAST_LABELLED = 0.06  # share of the panel's width that a phase needs for its name to be legible


def memory_picture(
    plain: Footing,
    planned: Footing | None,
    *,
    budget_bytes: int | None = None,
    measured_peak_bytes: int | None = None,
    plain_micro_batches: int = 1,
    micro_batches: int = 1,
) -> bytes:
    """A PNG, 1200 pixels wide: memory over the operators of a step, stacked by category, on one scale.

    `plain` is the step without levers, `planned` the one that runs, None where it is the same. Raises `InputError`
    where matplotlib is not installed.
    """
    figure = _new_figure()
    steps = [(f"Plain: no lever{_shown(plain_micro_batches)}", plain)]
    if planned is not None:
        steps.append((f"Planned: as it ran{_shown(micro_batches)}", planned))
    axes = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    unit, divisor = _unit(plain.peak_bytes)
    for axis, (name, footing) in zip(axes, steps, strict=True):
        measured = measured_peak_bytes if axis is axes[-1] else None
        _draw_step(axis, name, footing, divisor, budget_bytes, measured)
    highest = max(size for size in (plain.peak_bytes, budget_bytes, measured_peak_bytes) if size)
    axes[0].set_ylim(0, HEADROOM * highest / divisor)
    axes[0].set_ylabel(f"memory in use ({unit})")
    figure.suptitle(_title(plain, planned, budget_bytes, measured_peak_bytes), fontsize=13)
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DOTS)
    return image.getvalue()


def _new_figure() -> Any:
    """A figure that belongs to no window, whatever the user's backend is."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"memory.png needs the package matplotlib: {INSTALL_HINT}") from error
    return Figure(figsize=(WIDTH, HEIGHT), layout="constrained")


def _draw_step(
    axis: "Axes", name: str, footing: Footing, divisor: int, budget_bytes: int | None, measured_bytes: int | None
) -> None:
    """One panel: phases behind, categories stacked, the budget across, the peaks marked."""
    count = len(footing.timeline_phases)
    times = range(count)
    shown = [category for category in COLOURS if any(footing.timeline.get(category, ()))]
    axis.stackplot(
        times,
        [[size / divisor for size in footing.timeline[category]] for category in shown],
        labels=shown,
        colors=[COLOURS[category] for category in shown],
        step="mid",
    )
    if budget_bytes is not None:
        axis.axhline(budget_bytes / divisor, color=BUDGET_COLOUR, linestyle="--", linewidth=2, label="budget")
    _mark_peak(axis, footing, divisor, measured_bytes)
    _shade_phases(axis, footing.timeline_phases)
    axis.set_xlim(0, count - 1)
    axis.set_xticks([])
    axis.set_xlabel("operators of one step, in the order in which they run")
    axis.set_title(name)
    axis.spines[["top", "right"]].set_visible(False)


def _mark_peak(axis: "Axes", footing: Footing, divisor: int, measured_bytes: int | None) -> None:
    levels = [sum(sizes) for sizes in zip(*footing.timeline.values(), strict=True)]
    at = levels.index(max(levels))
    if measured_bytes is not None:
        axis.plot(
            [at], [measured_bytes / divisor], "o", color=MEASURED_COLOUR, markersize=8, label="measured peak", zorder=5
        )
    axis.annotate(
        f"peak {format_bytes(footing.peak_bytes)}\nin {footing.peak_phase}",
        (at, footing.peak_bytes / divisor),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        va="bottom",
    )


def _shade_phases(axis: "Axes", phases: Sequence[str]) -> None:
    """Each phase in its tint and named at the top of its longest run; recompute comes in many short runs, so it has a
    line in the legend instead.
    """
    runs: list[tuple[str, int, int]] = []  # phase, first operator, one past the last
    for phase, run in itertools.groupby(phases):
        start = runs[-1][2] if runs else 0
        runs.append((phase, start, start + len(list(run))))
    in_legend = False
    for phase, start, end in runs:
        label = phase if phase == "recompute" and not in_legend else None
        in_legend = in_legend or label is not None
        axis.axvspan(start, end, color=PHASE_TINTS[phase], zorder=0, linewidth=0, label=label)
    for name in dict.fromkeys(phase for phase in phases if phase != "recompute"):
        _, start, end = max((run for run in runs if run[0] == name), key=lambda run: run[2] - run[1])
        if end - start >= LEAST_LABELLED * len(phases):
            middle = (start + end) / 2
            axis.text(middle, 0.99, name, transform=axis.get_xaxis_transform(), ha="center", va="top")


def _shown(micro_batches: int) -> str:
    """What of the micro-batches a timeline shows: the last two, all before the second being like the second."""
    if micro_batches == 1:
        return ""
    return ", 2 micro-batches" if micro_batches == 2 else f", the last 2 of {micro_batches} micro-batches"


def _title(plain: Footing, planned: Footing | None, budget_bytes: int | None, measured_bytes: int | None) -> str:
    parts = [f"plain {format_bytes(plain.peak_bytes)}"]
    if planned is not None:
        share = planned.peak_bytes / plain.peak_bytes
        parts.append(f"planned {format_bytes(planned.peak_bytes)} ({share:.0%} of plain)")
    if measured_bytes is not None:
        parts.append(f"measured {format_bytes(measured_bytes)}")
    if budget_bytes is not None:
        parts.append(f"budget {format_bytes(budget_bytes)}")
    return f"Peak memory of a training step: {', '.join(parts)}"


def _unit(size: int) -> tuple[str, int]:
    """The unit of an axis, and its bytes."""
    return ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)
