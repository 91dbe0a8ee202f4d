"""Seconds that others published for cards: split before they were fitted, predicted as the committed results say."""

import json
import random
import statistics
from pathlib import Path

import pytest

from tightfit.devices.known import kernels_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "published_seconds.json").read_text("utf-8"))
SAMPLE = 24  # of operators, besides the training steps below
STEPS = (
    "gilesthomas/gpt2-163m/fp32/5x1024/rtx3090",
    "gilesthomas/gpt2-163m/tf32/5x1024/rtx3090",
    "gilesthomas/gpt2-163m/fp16/6x1024/rtx3090",
    "llm-foundry/mpt-125m/32x2048/a100-80",
)


@pytest.fixture(scope="module")
def published():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        from benchmarks.published import halves, predicted_seconds, seconds, work_done

        patch.setattr(seconds, "remembered_work", lambda rows, path: {r["id"]: work_done.work_done(r) for r in rows})
        yield halves, predicted_seconds, seconds


@pytest.fixture(scope="module")
def judged(published):
    halves, _, seconds = published
    rows = {row["id"]: row for row in halves.rows()}
    operators = [row for row in rows.values() if row["kind"] == "operator" and not halves.is_for_fitting(row)]
    chosen = [*random.Random(12).sample(operators, SAMPLE), *(rows[name] for name in STEPS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "rows", lambda: chosen)
        return {row["id"]: row for row in seconds.judged_rows(None)}


def test_the_halves_are_those_that_were_committed_before_the_fit(published):
    halves = published[0]
    seen = [row["id"] for row in halves.rows() if halves.is_for_fitting(row)]
    assert len(seen) == 194
    assert len(halves.rows()) - len(seen) == 214
    assert "llm-foundry/mpt-125m/104x512/a100-40" in seen


def test_a_row_has_a_source_and_a_figure_or_the_reason_why_it_is_not_judged(published):
    halves = published[0]
    for row in (*halves.rows(), *halves.unsaid()):
        assert row["source"] in halves.sources()
        assert row["published"] > 0
        assert "unsaid" in row or row["seconds"] > 0
    names = [row["id"] for row in (*halves.rows(), *halves.unsaid())]
    assert len(set(names)) == len(names)


@pytest.mark.slow  # every published rate
def test_the_committed_predictions_are_those_of_this_commit(judged):
    committed = {row["id"]: row["predicted"] for row in RESULTS["rows"]}
    for name, row in judged.items():
        assert row["predicted"] == pytest.approx(committed[name], rel=1e-6), (
            "run: python -m benchmarks.published.seconds"
        )


@pytest.mark.keeps("known-card-more-same")
def test_seconds_that_were_not_fitted_are_predicted_within_bounds(judged):
    errors = {name: abs(row["predicted"] / row["seconds"] - 1) for name, row in judged.items() if not row["fitted"]}
    assert statistics.median(errors.values()) < 0.15
    assert all(errors[name] < 0.3 for name in STEPS if name in errors)


def test_all_seconds_that_were_not_fitted_are_within_what_the_page_says():
    errors = [abs(row["predicted"] / row["seconds"] - 1) for row in RESULTS["rows"] if not row["fitted"]]
    assert statistics.median(errors) == pytest.approx(RESULTS["judged"]["all"]["median"])
    assert max(errors) == pytest.approx(RESULTS["judged"]["all"]["worst"])
    assert RESULTS["judged"]["all"]["median"] < 0.15
    assert RESULTS["judged"]["steps"]["worst"] < 0.3


@pytest.mark.keeps("known-card-more-same")
def test_precisions_and_lengths_are_predicted_in_the_order_that_was_published(published, judged):
    seconds = published[2]
    pairs = list(seconds.variants(list(judged.values())))
    assert len(pairs) == 3
    assert all(seconds.in_order(*pair) for pair in pairs)
    assert RESULTS["variants"]["in order"] >= 0.97 * RESULTS["variants"]["pairs"]


def test_unaligned_products_on_hopper_have_the_share_that_an_h200_was_measured_with(published):
    from benchmarks.published.fit_seconds import unaligned_on_hopper

    share = kernels_of("hopper").shares["product/unaligned"]
    assert share == pytest.approx(unaligned_on_hopper(), rel=1e-3)
    assert share < 0.25 < kernels_of("ampere_a100").shares["product/unaligned"]


def test_a_guess_stays_where_no_row_tells_otherwise(published):
    """A dry run of nothing leaves the penalties alone to decide: the search has nothing to change."""
    from benchmarks.published.fit_seconds import Fit, guesses, kernels

    row = {**published[0].rows()[0], "seconds": 1.0}
    fit = Fit([row], {row["id"]: {}})
    assert fit._penalty(guesses(), {}) == 0
    assert kernels(guesses(), "hopper").shares["attention/forward"] == 0.6
    assert fit._penalty({**guesses(), "norm": 0.4}, {}) > 0
