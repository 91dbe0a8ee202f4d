"""Draws the losses of several runs over their steps."""

from collections.abc import Sequence
from typing import Protocol

from tightfit.errors import InputError
from tightfit.planner.report.picture import HEIGHT, PALETTE, new_figure, png

DIMMED = 0.35  # opacity of the losses of single batches, which are drawn behind their running mean
SMOOTHED_FROM = 40  # a curve with fewer points is drawn without a running mean
WINDOWS = 25  # the running mean is over 1 / 25 of the points
MARKER = "o"


class LossCurve(Protocol):
    """The name and the losses of a run. Each loss is (step, loss)."""

    @property
    def name(self) -> str: ...

    @property
    def losses(self) -> Sequence[tuple[int, float]]: ...

    @property
    def validation(self) -> Sequence[tuple[int, float]]: ...


def loss_picture(curves: Sequence[LossCurve]) -> bytes:
    """A PNG, 1200 by 600 pixels: the training loss of each run, and its losses on held-out samples as dots.

    Raises `InputError` if no run has a loss, or if matplotlib is not installed.
    """
    if not any(curve.losses or curve.validation for curve in curves):
        raise InputError("none of these runs has a loss to draw")
    figure = new_figure(HEIGHT)
    axis = figure.subplots()
    for number, curve in enumerate(curves):
        colour = PALETTE[number % len(PALETTE)]
        style = "-" if number < len(PALETTE) else "--"
        steps, losses = [step for step, _ in curve.losses], [loss for _, loss in curve.losses]
        if len(losses) >= SMOOTHED_FROM:
            axis.plot(steps, losses, color=colour, alpha=DIMMED, linewidth=1)
            losses = running_mean(losses, len(losses) // (2 * WINDOWS))
        axis.plot(steps, losses, style, color=colour, linewidth=2, label=curve.name)
        if curve.validation:
            places, values = zip(*curve.validation, strict=True)
            axis.plot(places, values, MARKER, color=colour, markersize=7, markeredgecolor="#333333", zorder=5)
    if any(curve.validation for curve in curves):
        axis.plot([], [], MARKER, color="#FFFFFF", markeredgecolor="#333333", label="on held-out samples")
    axis.set_xlabel("optimizer steps")
    axis.set_ylabel("loss (nats a token)")
    axis.set_title("Training loss")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return png(figure)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and of up to `width` neighbours on each side."""
    means = []
    for place in range(len(values)):
        # Equal numbers on both sides, also at the ends: otherwise the mean of a falling curve would be shifted.
        reach = min(width, place, len(values) - 1 - place)
        window = values[place - reach : place + reach + 1]
        means.append(sum(window) / len(window))
    return means
