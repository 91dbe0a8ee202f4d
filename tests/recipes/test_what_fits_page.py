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


def test_a_table_shows_the_hosts_memory_and_streamed_blocks_where_its_answer_says_them(record, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    section = importlib.import_module("what_fits").section
    row = record["results"][0]
    first = {**next(recipe for recipe in row["recipes"] if recipe["fits"])}
    streamed = {**first, "host_peak_bytes": 3 << 30, "streamed_blocks": 20}
    nothing = {**first, "fits": False, "needed_bytes": 9 << 30}
    text = section({**row, "recipes": [streamed, nothing]})
    header, _, line = (each for each in text.splitlines() if each.startswith("|"))
    cells = dict(zip(header.split("|"), line.split("|"), strict=True))
    assert (cells[" host "], cells[" blocks streamed "]) == (" 3.0 GiB ", " 20 ")
    assert "host" not in section({**row, "recipes": [{**first, "host_peak_bytes": None}]}).splitlines()[4]
