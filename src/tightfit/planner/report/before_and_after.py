"""The table and the picture of a compression: a model before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.planner.report.picture import HEIGHT, new_figure, png
from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.units import format_bytes

Figures = Mapping[str, Any]

# Field, name in the table, and how a figure is written.
ROWS: tuple[tuple[str, str], ...] = (
    ("parameters", "parameters"),
    ("disk_bytes", "weights on disk"),
    ("inference_peak_bytes", "peak of inference, predicted"),
    ("measured_inference_peak_bytes", "peak of inference, measured"),
    ("step_peak_bytes", "peak of a training step, predicted"),
    ("measured_step_peak_bytes", "peak of a training step, measured"),
    ("tokens_per_second", "tokens a second, one forward"),
    ("perplexity", "perplexity"),
)
BEFORE_COLOUR, AFTER_COLOUR = "#999999", "#0072B2"  # Okabe and Ito's palette, as in `report.picture`


def table(method: str, before: Figures, after: Figures, notes: Sequence[str] = (), *, width: int = WIDTH) -> str:
    """Before and after side by side. Rows without a figure on either side are left out."""
    shown = table_of(method, "before", "after", "of before")
    for key, name in ROWS:
        one, other = before.get(key), after.get(key)
        if one is None and other is None:
            continue
        share = f"{other / one:.1%}" if one and other is not None else ""
        shown.add_row(name, figure_in_words(key, one), figure_in_words(key, other), share)
    return rendered(shown, *([""] if notes else []), *notes, width=width)


def figure_in_words(key: str, value: float | None) -> str:
    """A figure of a side by the name of its field; empty for None."""
    if value is None:
        return ""
    if key.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:,.2f}" if key == "perplexity" else f"{value:,.0f}"


def picture(method: str, before: Figures, after: Figures) -> bytes:
    """A PNG, 1200 by 600 pixels: each figure's bar after, beside the one before, of which it is a share.

    Raises `InputError` if matplotlib is not installed.
    """
    known = [(key, name) for key, name in ROWS if before.get(key) and after.get(key) is not None]
    figure = new_figure(HEIGHT)
    axis = figure.subplots()
    places = range(len(known))
    axis.barh([p - 0.2 for p in places], [1.0] * len(known), 0.36, color=BEFORE_COLOUR, label="before")
    shares = [after[key] / before[key] for key, _ in known]
    axis.barh([p + 0.2 for p in places], shares, 0.36, color=AFTER_COLOUR, label="after")
    for place, (key, _) in zip(places, known, strict=True):
        axis.text(1.0, place - 0.2, f" {figure_in_words(key, before[key])}", va="center")
        axis.text(shares[place], place + 0.2, f" {figure_in_words(key, after[key])}", va="center")
    axis.set_yticks(list(places), [name for _, name in known])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max([1.0, *shares]))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_title(method)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    return png(figure)
