"""Published peaks of graphics cards: a sample is predicted anew, and all that the page says is what the file says."""

import importlib
import json
import random
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SLOW = {"fused_moe", "sparsemax"}  # a loop over 128 experts; a sort that is computed
SAMPLE = 40


@pytest.fixture(scope="module")
def peaks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("benchmarks.published.peaks")


def results() -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text("utf-8"))["results"]


@pytest.mark.keeps("published-peaks-cards-predicted")
def test_a_sample_of_published_peaks_is_predicted_within_a_percent(peaks):
    clear = [row for row in peaks.rows() if row.ambiguous is None and row.work not in SLOW]
    models = [row for row in clear if row.mode == "step"]
    operators = [row for row in clear if row.mode != "step"]
    draw = random.Random(12)
    sample = [*draw.sample(operators, SAMPLE), min(models, key=lambda row: row.published)]
    errors = [abs(peaks.compare(row, row.predict())["error"]) for row in sample]
    assert max(errors) <= 0.01
    assert statistics.median(errors) <= 0.0001


def test_the_results_are_of_the_rows_that_are_there(peaks):
    described = [peaks.described(row) for row in peaks.rows()]
    assert [{name: result[name] for name in described[0]} for result in results()] == described


@pytest.mark.keeps("published-peaks-cards-predicted")
def test_every_row_that_says_what_it_ran_is_within_a_percent_and_whole_models_within_half_of_one():
    clear = [row for row in results() if row["ambiguous"] is None]
    errors = [abs(row["error"]) for row in clear]
    assert max(error for error, row in zip(errors, clear, strict=True) if not row["rounds_to_it"]) <= 0.01
    assert statistics.median(errors) <= 0.0001
    assert max(abs(row["error"]) for row in clear if row["mode"] == "step") <= 0.005


def test_a_row_is_ambiguous_only_for_something_that_its_source_lacks_and_every_miss_has_a_cause():
    for row in results():
        assert row["ambiguous"] is None or len(row["ambiguous"]) > 20
        assert row["ambiguous"] or row["cause"] or abs(row["error"]) <= 0.0001


def test_the_guide_says_what_the_results_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("accuracy_page")
    line = page.published_line(json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text("utf-8")))
    guide = " ".join((ROOT / "docs" / "guide.md").read_text("utf-8").split())
    assert line.removesuffix(".") in guide
