"""The pages of figures say what the files of results say: none was written or left behind by hand."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "zoo.md": ("zoo_page", "zoo.json", lambda record: (record["results"], record["environment"])),
    "budgets.md": ("budgets", "budgets.json", lambda record: (record["results"], record["environment"])),
    "compression_results.md": ("compressed", "compression.json", lambda record: (record,)),
    "optimizers.md": ("optimizers", "optimizers.json", lambda record: (record,)),
}


@pytest.mark.keeps("pages-figures-match-files")
@pytest.mark.parametrize("name", CASES)
def test_the_page_says_what_the_results_file_says(name, monkeypatch):
    module, results, arguments = CASES[name]
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    record = json.loads((ROOT / "benchmarks" / "results" / results).read_text("utf-8"))
    page = importlib.import_module(module).page(*arguments(record))
    assert (ROOT / "docs" / name).read_text("utf-8") == page


@pytest.mark.parametrize("name", ["scripts_on_cards", "packages_on_cards", "gpu.scripts"])
def test_the_table_of_trainings_of_others_is_that_of_the_results_file(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    module = importlib.import_module(f"benchmarks.{name}")
    table = module.table(json.loads(module.RESULTS.read_text("utf-8")))
    assert len(table.splitlines()) > 6
    for page in importlib.import_module("benchmarks.scripts_on_cards").PAGES:
        assert module.BEGIN + table + module.END in page.read_text("utf-8")


def test_the_sentence_about_the_hosts_memory_is_that_of_the_results_file(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("host_memory")
    record = json.loads(module.RESULTS.read_text("utf-8"))
    assert module.sentence(record["results"]) in (ROOT / "docs" / "training.md").read_text("utf-8")


def test_the_error_of_the_null_card_is_that_of_the_results_file(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    module = importlib.import_module("benchmarks.published.on_card")
    record = json.loads(module.RESULTS.read_text("utf-8"))
    assert module.summary(record["results"]) == record["summary"]
    assert module.sentence(record) in (ROOT / "docs" / "run.md").read_text("utf-8")
