import struct
import sys

import pytest

from drawn_figures import drawn_figures, lines, texts, top_of_stack
from tightfit.errors import InputError
from tightfit.planner.records import CurvePoint, StepFigures
from tightfit.planner.report.picture import COLOURS, PHASE_TINTS, curve_picture, memory_picture
from tightfit.tracing.record import Category, Phase

MIB = 2**20


def step_figures(activations: tuple[int, ...], phases: tuple[str, ...]) -> StepFigures:
    timeline = {str(category): tuple(MIB for _ in activations) for category in Category}
    timeline["activations"] = tuple(size * MIB for size in activations)
    return StepFigures(
        peak_bytes=(max(activations) + len(timeline) - 1) * MIB,
        step_seconds=1.0,
        by_category={},
        phase_peaks={},
        seconds_by_phase={},
        peak_phase="backward",
        peak_module="",
        peak_operator="",
        timeline=timeline,
        timeline_phases=phases,
    )


PLAIN = step_figures((1, 5, 9, 5, 1), ("forward", "forward", "backward", "backward", "optimizer"))
PLANNED = step_figures((1, 2, 4, 2, 1), ("forward", "forward", "recompute", "backward", "optimizer"))


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height from the header of a PNG."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_the_picture_is_a_png_1200_pixels_wide():
    png = memory_picture(PLAIN, PLANNED, budget_bytes=12 * MIB, measured_peak_bytes=9 * MIB, micro_batches=4)

    assert size_of(png) == (1200, 600)


def test_a_training_without_levers_or_budget_has_a_picture_too():
    assert size_of(memory_picture(PLAIN, None))[0] == 1200


@pytest.fixture
def figures(monkeypatch):
    return drawn_figures(monkeypatch)


def test_the_plain_step_alone_is_one_panel(figures):
    memory_picture(PLAIN, None)
    (axis,) = figures[0].axes
    assert axis.get_title() == "Plain: no lever"
    assert figures[0].get_suptitle() == "Peak memory of a training step: plain 14.00 MiB"
    assert texts(axis)[0] == "peak 14.00 MiB\nin backward"
    assert top_of_stack(axis) == 14
    assert lines(axis) == {}


def test_plan_budget_and_measurement_are_drawn_where_they_are(figures):
    memory_picture(PLAIN, PLANNED, budget_bytes=12 * MIB, measured_peak_bytes=8 * MIB, micro_batches=2)
    plain, planned = figures[0].axes
    assert plain.get_title() == "Plain: no lever"
    assert planned.get_title() == "Planned: as it ran, 2 micro-batches"
    assert (top_of_stack(plain), top_of_stack(planned)) == (14, 9)
    assert "peak 9.00 MiB\nin backward" in texts(planned)
    assert figures[0].get_suptitle() == (
        "Peak memory of a training step: plain 14.00 MiB, planned 9.00 MiB (64% of plain), measured 8.00 MiB, "
        "budget 12.00 MiB"
    )
    budget = [(0, 12), (1, 12)]  # across the panel
    assert lines(plain) == {"budget": budget}
    assert lines(planned) == {"budget": budget, "measured peak": [(2, 8)]}
    assert "recompute" in planned.get_legend_handles_labels()[1]
    assert "recompute" not in plain.get_legend_handles_labels()[1]


@pytest.mark.parametrize(
    ("count", "title"), [(1, "Planned"), (2, "Planned, 2 micro-batches"), (4, "Planned, the last 2 of 4 micro-batches")]
)
def test_the_title_says_which_micro_batches_are_shown(figures, count, title):
    memory_picture(PLAIN, PLANNED, micro_batches=count)
    assert figures[0].axes[1].get_title() == title


def test_every_category_has_a_colour_of_its_own_and_every_phase_a_tint():
    assert set(COLOURS) == set(Category)
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert set(PHASE_TINTS) == set(Phase)


def test_without_matplotlib_the_way_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(InputError, match=r"matplotlib: pip install 'tightfit\[report\]'"):
        memory_picture(PLAIN, None)


POINTS = (CurvePoint("no lever", 9 * MIB, 1.0), CurvePoint("3 of 4 blocks recompute", 4 * MIB, 1.1))


def test_a_curve_is_a_picture_of_its_own_or_stands_below_the_step(figures):
    assert size_of(curve_picture(POINTS, POINTS[:1])) == (1200, 600)
    whole = memory_picture(PLAIN, PLANNED, points=POINTS, recipes=POINTS[:1], budget_bytes=5 * MIB)
    assert size_of(whole) == (1200, 1200)
    alone, below = figures[0].axes[0], figures[1].axes[-1]
    curve = {"plans, by budget": [(9, 1), (4, 1.1)], "no lever": [(9, 1)]}
    assert lines(alone) == curve
    assert lines(below) == {**curve, "this plan": [(9, 1)], "budget": [(5, 0), (5, 1)]}  # that of the planned step
