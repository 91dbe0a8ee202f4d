"""The trade-off curve: what memory costs in time, every point traced as applied."""

import json
import os
from itertools import pairwise

import pytest

import tightfit
from made_up_devices import even
from tightfit.errors import InputError
from tightfit.planner.curves import Curve, frontier
from tightfit.planner.levers import Combination
from tightfit.planner.records import CurvePoint
from tightfit.planner.request import Request
from tightfit.planner.search import search as searching
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.search import Search
from tiny import allocator_peak, decoder, token_batch

POINTS = 4


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=4)


@pytest.fixture(scope="module")
def curve(model):
    return tightfit.curve(model, token_batch(8), levers="rounding", points=POINTS)


@pytest.fixture(scope="module")
def with_curve(model):
    """A plan of bit-exact levers, with its curve."""
    return tightfit.plan(model, token_batch(8), "0.7x", curve=True)


@pytest.mark.keeps("fixed-recipe-beats-trade")
@pytest.mark.slow  # a curve of many points
def test_bytes_fall_and_seconds_rise_along_the_curve(curve):
    assert len(curve.points) > POINTS
    for left, right in pairwise(curve.points):
        assert right.peak_bytes < left.peak_bytes
        assert right.step_seconds > left.step_seconds


@pytest.mark.keeps("fixed-recipe-beats-trade")
@pytest.mark.slow  # a curve of many points, so that there is one near each recipe
def test_no_recipe_beats_the_curve(model, curve):
    """The curve takes recipes in, so that this alone proves nothing: a plan, which knows none, is as fast as each."""
    assert len(curve.recipes) == 5
    for recipe in curve.recipes:
        point = curve.within(recipe.peak_bytes)
        made = tightfit.plan(model, token_batch(8), recipe.peak_bytes + UNSEEN_BYTES, levers="rounding")
        assert point.step_seconds <= recipe.step_seconds
        assert made.step_seconds <= recipe.step_seconds + 1e-9  # sums of the same seconds, in another order
        assert made.peak_bytes <= recipe.peak_bytes


@pytest.mark.keeps("fixed-recipe-beats-trade")
@pytest.mark.slow  # a curve of many points
def test_a_recipe_is_what_the_allocator_records(model, curve):
    peaks = {recipe.levers: recipe.peak_bytes for recipe in curve.recipes}
    batch = token_batch(8)
    assert peaks["no lever"] == pytest.approx(allocator_peak(model, batch), rel=0.001)
    with tightfit.recompute(model, "layers.*"):
        assert peaks["every block recomputed"] == pytest.approx(allocator_peak(model, batch), rel=0.001)
    with tightfit.recompute(model, "layers.1"), tightfit.recompute(model, "layers.3"):
        assert peaks["every second block recomputed"] == pytest.approx(allocator_peak(model, batch), rel=0.001)
    assert {"chunked loss", "chunked loss, every block recomputed"} < set(peaks)


@pytest.mark.keeps("fixed-recipe-beats-trade")
@pytest.mark.slow  # a plan for each point
def test_no_plan_is_slower_than_the_curve_at_its_budget(model, curve):
    """A plan searches more than the curve, which solves for some budgets: it may beat a point, never miss it."""
    point = curve.points[len(curve.points) // 2]
    made = tightfit.plan(model, token_batch(8), point.peak_bytes + 1024, levers="rounding")
    assert made.peak_bytes <= point.peak_bytes + 1024
    assert made.step_seconds <= point.step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_what_is_added_up_from_one_micro_batch_is_the_whole_step(model, micro_batches):
    """Else a combination could be passed over as too slow that is not: plans took more memory for less budget."""
    search = Search(Request.of(model, token_batch(8)).checked(), "1x")
    fastest(search)
    combination = Combination.of(micro_batches)
    whole = search.tracer.whole(combination, {})
    assert search.with_optimizer(search.part(combination)) == pytest.approx(whole.step_seconds)


@pytest.mark.slow  # a plan with its curve
def test_a_plan_with_its_curve_lies_on_it_and_survives_its_json(with_curve, tmp_path):
    made = with_curve
    assert made.peak_bytes in [point.peak_bytes for point in made.curve.points]
    assert not any("chunked" in point.levers for point in made.curve.points), "only what the plan may use"
    made.to_json(tmp_path / "plan.json")
    assert tightfit.Plan.from_json(tmp_path / "plan.json") == made
    assert "every second block recomputed" in str(made)


@pytest.mark.slow  # a plan with its curve
def test_levers_that_were_not_allowed_have_figures_beside_a_curve(with_curve):
    made = with_curve
    forbidden = {r.levers: r for r in made.rejected if "not among the levers" in r.reason}
    assert set(forbidden) == {"chunked loss", "2 micro-batches", "tiles of 48 tokens"}
    assert all(r.peak_bytes < made.plain_peak_bytes and r.step_seconds > 0 for r in forbidden.values())


@pytest.mark.slow  # a curve of many points
def test_a_curve_is_a_table_and_json(curve, tmp_path):
    assert "fixed recipes" in str(curve)
    curve.to_json(tmp_path / "curve.json")
    assert Curve.from_dict(json.loads((tmp_path / "curve.json").read_text())) == curve


def test_the_frontier_is_what_nothing_else_beats():
    fast, small, worse = CurvePoint("fast", 9, 1.0), CurvePoint("small", 3, 2.0), CurvePoint("worse", 4, 2.0)
    assert frontier([worse, small, fast]) == (fast, small)


@pytest.mark.slow  # a curve twice
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="forks are used on Linux only")
def test_forks_trace_the_same_curve(monkeypatch):
    shared, processes = searching.shared_out, []

    def drawn():
        model = decoder(hidden_size=32, num_layers=2)
        return tightfit.curve(model, token_batch(2), levers=["recompute", "chunked_loss"], points=2, device=even())

    def by_two(work, parts, notice, count):
        processes.append(count)
        return shared(work, parts, notice, count)

    alone = drawn()
    monkeypatch.setattr(searching, "processes_for", lambda parts: min(2, parts))
    monkeypatch.setattr(searching, "shared_out", by_two)
    assert drawn() == alone
    assert processes == []  # forks are not worth their while where a trace takes a moment
    monkeypatch.setattr(searching, "SMALL", 0)
    assert drawn() == alone
    assert processes == [2, 2]  # prices, then points


def test_no_points_are_no_curve(model):
    with pytest.raises(InputError, match="points is 0"):
        tightfit.curve(model, token_batch(8), points=0)
