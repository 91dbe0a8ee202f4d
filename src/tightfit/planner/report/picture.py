"""Draws pictures: the memory of a training step by category, plain beside planned, and the trade-off curve."""

import io
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError
from tightfit.planner.records import CurvePoint, StepFigures
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL_HINT = "pip install 'tightfit[report]'"
# Okabe and Ito's palette, distinguishable with any colour vision ("Color Universal Design", 2008). From the bottom:
# memory that is held throughout the step, then memory that comes and goes.
COLOURS = {
    "parameters": "#0072B2",
    "optimizer states": "#56B4E9",
    "gradients": "#009E73",
    "inputs": "#999999",
    "activations": "#E69F00",
    "workspace": "#CC79A7",
}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # for lines, one after another
BUDGET_COLOUR, MEASURED_COLOUR = "#D55E00", "#000000"
# Behind the stack: pale tints of colours that the stack does not use.
PHASE_TINTS = {"forward": "#FFFFFF", "recompute": "#CFE8F7", "backward": "#EDEDED", "optimizer": "#FFFFFF"}
HEADROOM = 1.3  # above the highest bar: for its label and the names of the phases
WIDTH, HEIGHT, DOTS = 12.0, 6.0, 100  # inches and dots per inch: 1200 by 600
CURVE_COLOUR, CHOSEN_COLOUR = "#0072B2", "#D55E00"
RECIPE_MARKERS = "osD^v"
LEGEND_COLUMNS = 5
LEAST_LABELLED = 0.06  # share of the panel's width that a phase needs for its name to be legible


def memory_picture(
    plain: StepFigures,
    planned: StepFigures | None,
    *,
    budget_bytes: int | None = None,
    measured_peak_bytes: int | None = None,
    plain_micro_batches: int = 1,
    micro_batches: int = 1,
    points: Sequence[CurvePoint] = (),
    recipes: Sequence[CurvePoint] = (),
) -> bytes:
    """A PNG, 1200 pixels wide: memory over the operators of a step, stacked by category, on one scale.

    `plain` is the step without levers, `planned` the step that runs; None if it is the same. With `points`, the
    trade-off curve is drawn below. Raises `InputError` if matplotlib is not installed.
    """
    figure = new_figure(2 * HEIGHT if points else HEIGHT)
    upper, lower = figure.subfigures(2, 1) if points else (figure, None)
    steps = [(f"Plain: no lever{_shown(plain_micro_batches)}", plain)]
    if planned is not None:
        ran = "" if measured_peak_bytes is None else ": as it ran"
        steps.append((f"Planned{ran}{_shown(micro_batches)}", planned))
    axes = upper.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    unit, divisor = _unit(plain.peak_bytes)
    for axis, (name, step_figures) in zip(axes, steps, strict=True):
        measured = measured_peak_bytes if axis is axes[-1] else None
        _draw_step(axis, name, step_figures, divisor, budget_bytes, measured)
    highest = max(size for size in (plain.peak_bytes, budget_bytes, measured_peak_bytes) if size)
    axes[0].set_ylim(0, HEADROOM * highest / divisor)
    axes[0].set_ylabel(f"memory in use ({unit})")
    upper.suptitle(_title(plain, planned, budget_bytes, measured_peak_bytes), fontsize=13)
    handles, labels = axes[-1].get_legend_handles_labels()
    upper.legend(handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False)
    if lower is not None:
        chosen = None if planned is None else planned.peak_bytes
        _draw_curve(lower.subplots(), points, recipes, chosen, budget_bytes)
    return png(figure)


def curve_picture(points: Sequence[CurvePoint], recipes: Sequence[CurvePoint]) -> bytes:
    """A PNG, 1200 by 600 pixels: step time against peak, the recipes beside the curve.

    Raises `InputError` if matplotlib is not installed.
    """
    figure = new_figure(HEIGHT)
    _draw_curve(figure.subplots(), points, recipes)
    return png(figure)


def png(figure: Any) -> bytes:
    """The figure as a PNG."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DOTS)
    return image.getvalue()


def _draw_curve(
    axis: "Axes",
    points: Sequence[CurvePoint],
    recipes: Sequence[CurvePoint],
    chosen_bytes: int | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Draw step time against peak; relative to the plain step's time, if that is known."""
    unit, divisor = _unit(max(point.peak_bytes for point in (*points, *recipes)))
    plain = next((recipe.step_seconds for recipe in recipes), points[0].step_seconds) or 1.0

    def place(some: Sequence[CurvePoint]) -> tuple[list[float], list[float]]:
        return [point.peak_bytes / divisor for point in some], [point.step_seconds / plain for point in some]

    axis.plot(*place(points), "-o", color=CURVE_COLOUR, markersize=5, linewidth=2, label="plans, by budget")
    for recipe, marker, colour in zip(recipes, RECIPE_MARKERS, list(COLOURS.values())[1:], strict=False):
        axis.plot(*place([recipe]), marker, color=colour, markersize=10, label=recipe.levers, markeredgecolor="#333333")
    chosen = [point for point in points if point.peak_bytes == chosen_bytes]
    if chosen:
        axis.plot(*place(chosen), "*", color=CHOSEN_COLOUR, markersize=18, label="this plan", zorder=5)
    if budget_bytes is not None:
        axis.axvline(budget_bytes / divisor, color=BUDGET_COLOUR, linestyle="--", linewidth=2, label="budget")
    axis.set_xlim(left=0)
    axis.set_xlabel(f"peak memory ({unit})")
    axis.set_ylabel("step time (of plain)")
    axis.yaxis.set_major_formatter("{x:.2f}x")
    axis.set_title("What memory costs in time: every point traced as applied")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)


def new_figure(height: float) -> Any:
    """A figure without a window, whatever the user's backend."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"a picture needs the package matplotlib: {INSTALL_HINT}") from error
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _draw_step(
    axis: "Axes",
    name: str,
    step_figures: StepFigures,
    divisor: int,
    budget_bytes: int | None,
    measured_bytes: int | None,
) -> None:
    """Draw one panel: phases in the background, stacked categories, the budget as a line, and the peaks."""
    stack_categories(axis, step_figures, divisor)
    if budget_bytes is not None:
        axis.axhline(budget_bytes / divisor, color=BUDGET_COLOUR, linestyle="--", linewidth=2, label="budget")
    _mark_peak(axis, step_figures, divisor, measured_bytes)
    _shade_phases(axis, step_figures.timeline_phases)
    axis.set_xlim(0, len(step_figures.timeline_phases) - 1)
    axis.set_xticks([])
    axis.set_xlabel("operators of one step, in the order in which they run")
    axis.set_title(name)
    axis.spines[["top", "right"]].set_visible(False)


def stack_categories(axis: "Axes", step_figures: StepFigures, divisor: int) -> None:
    """Draw the timeline of a step as stacked categories, without those that are empty throughout."""
    shown = [category for category in COLOURS if any(step_figures.timeline.get(category, ()))]
    axis.stackplot(
        range(len(step_figures.timeline_phases)),
        [[size / divisor for size in step_figures.timeline[category]] for category in shown],
        labels=shown,
        colors=[COLOURS[category] for category in shown],
        step="mid",
    )


def _mark_peak(axis: "Axes", step_figures: StepFigures, divisor: int, measured_bytes: int | None) -> None:
    levels = [sum(sizes) for sizes in zip(*step_figures.timeline.values(), strict=True)]
    at = levels.index(max(levels))
    if measured_bytes is not None:
        axis.plot(
            [at], [measured_bytes / divisor], "o", color=MEASURED_COLOUR, markersize=8, label="measured peak", zorder=5
        )
    axis.annotate(
        f"peak {format_bytes(step_figures.peak_bytes)}\nin {step_figures.peak_phase}",
        (at, step_figures.peak_bytes / divisor),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        va="bottom",
    )


def _shade_phases(axis: "Axes", phases: Sequence[str]) -> None:
    """Shade each phase in its tint, and name it at the top of its longest run.

    Recompute has many short runs, so the legend names it instead.
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
    """The micro-batches in a timeline, in words. It shows two: all after the first are like the second."""
    if micro_batches == 1:
        return ""
    return ", 2 micro-batches" if micro_batches == 2 else f", the last 2 of {micro_batches} micro-batches"


def _title(
    plain: StepFigures, planned: StepFigures | None, budget_bytes: int | None, measured_bytes: int | None
) -> str:
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
