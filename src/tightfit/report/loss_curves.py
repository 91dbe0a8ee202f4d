"""A picture of the losses of several runs over their steps."""

from collections.abc import Sequence
from typing import Protocol

from tightfit.errors import InputError
from tightfit.report.picture import HEIGHT, PALETTE, new_figure, png

DIMMED = 0.35  # of the losses of single batches, behind their mean
SMOOTHED_FROM = 40  # points; a curve of fewer is drawn as it is
WINDOWS = 25  # a mean is taken over the points divided by so many
MARKER = "o"


class LossCurve(Protocol):
    """What is drawn of a run."""

    @property
    def name(self) -> str: ...

    @property
    def losses(self) -> Sequence[tuple[int, float]]: ...

    @property
    def validation(self) -> Sequence[tuple[int, float]]: ...


def loss_picture(curves: Sequence[LossCurve]) -> bytes:
    """A PNG, 1200 by 600 pixels: the training loss of each run, and its losses on held-out samples as dots.

    Raises `InputError` where no run has a loss, or where matplotlib is not installed.
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
    """The mean of each value and of up to `width` on both sides of it, as many on the one as on the other, so that a
    falling curve is not shifted.
    """
    means = []
    for place in range(len(values)):
        reach = min(width, place, len(values) - 1 - place)
        window = values[place - reach : place + reach + 1]
        means.append(sum(window) / len(window))
    return means
