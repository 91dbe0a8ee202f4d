"""The page of what fits says what the file of results says, and the recipes that everybody uses are on it."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "what_fits.json", ROOT / "docs" / "what_fits.md"
FIRST_ROWS = 5
USUAL = {
    ("llama-2-7b", "rtx3080,memory=8GiB"): "on nf4",
    ("mistral-7b", "rtx3060-12"): "on nf4",
    ("llama-3.1-8b", "rtx4090"): "LoRA",
    ("llama-3.1-8b", "h100"): "8-bit AdamW",
}


@pytest.fixture(scope="module")
def record():
    return json.loads(RESULTS.read_text("utf-8"))


def test_the_page_says_what_the_results_say(record, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("what_fits").page(record)
    assert PAGE.read_text("utf-8") == page


def test_every_pair_was_asked(record, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pairs = importlib.import_module("what_fits").PAIRS
    assert [(row["model"], row["device"]) for row in record["results"]] == [pair[:2] for pair in pairs]


def test_the_recipes_that_everybody_uses_are_among_the_first_rows(record):
    rows = {(row["model"], row["device"]): row["recipes"] for row in record["results"]}
    for pair in USUAL:
        first = [recipe["name"] for recipe in rows[pair][:FIRST_ROWS] if recipe["fits"]]
        assert any(USUAL[pair] in name for name in first), (pair, first)
