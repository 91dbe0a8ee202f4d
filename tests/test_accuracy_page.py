import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def accuracy_page():
    spec = importlib.util.spec_from_file_location("accuracy_page", ROOT / "benchmarks" / "accuracy_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.keeps("pages-figures-match-files")
def test_the_page_says_what_the_results_files_say():
    module = accuracy_page()
    assert module.PAGE.read_text("utf-8") == module.page(), "run: python benchmarks/accuracy_page.py"


def test_the_guide_says_what_null_cards_say():
    module = accuracy_page()
    record = json.loads((module.RESULTS / "card.json").read_text("utf-8"))
    found, cards = record["summary"], len({row["card"] for row in record["steps"]})
    english, chinese = ((ROOT / "docs" / name).read_text("utf-8") for name in ("guide.md", "zh/guide.md"))
    assert f"{found['to_the_byte']} of {found['measured']} steps on {cards} cards predicted to the byte" in english
    assert f"{cards} 种显卡上的 {found['measured']} 个步骤中，{found['to_the_byte']} 个预测到字节" in chinese
    assert f"{found['over_budget']} of {found['planned']} plans above their budget" in english
    assert f"{found['planned']} 个计划中有 {found['over_budget']} 个超出预算" in chinese


def test_the_guide_says_what_a_real_card_said():
    found = json.loads((accuracy_page().RESULTS / "gpu.json").read_text("utf-8"))["summary"]
    peaks, seconds = found["errors"]["peak_bytes"], found["errors"]["step_seconds"]
    steps, planned, over = found["measured"], found["planned"], found["planned"] - found["within_budget"]
    median, worst = f"{peaks['median']:.2%}", f"{peaks['worst']:.1%}"
    english, chinese = (" ".join((ROOT / "docs" / at / "guide.md").read_text("utf-8").split()) for at in ("", "zh"))
    assert f"{steps} steps, median error {median}, worst {worst}, and {over} of {planned} plans above" in english
    assert f"{steps} 个步骤，误差中位数 {median}，最差 {worst}，{planned} 个计划中有 {over} 个" in chinese
    assert f"on the H200 {seconds['median']:.1%} and {seconds['worst']:.0%}." in english
    assert f"H200 上为 {seconds['median']:.1%} 和 {seconds['worst']:.0%}。" in chinese


def test_what_was_not_measured_is_said_to_be_missing(tmp_path):
    text = accuracy_page().page(tmp_path)
    first = "`benchmarks/accuracy.py`, `benchmarks/gpu`, `benchmarks/published/peaks.py`"
    assert f"Not measured at this commit: {first}" in text
    assert "##" not in text


def test_a_step_time_of_a_busy_machine_is_said_to_be_one(tmp_path):
    environment = {
        "machine": {"cpu": "Round"},
        "versions": {"torch": "2.13.0"},
        "threads": 2,
        "commit": "0123456789",
        "dirty": False,
    }
    row = {
        "case": "CPU8", "precision": "fp32", "variant": "plain", "predicted_seconds": 1.1, "median_seconds": 1.0,
        "least_seconds": 0.9, "error": 0.1, "others_cores": 0.0, "disturbed_by": "",
    }  # fmt: skip
    record = {"environment": environment, "device": {"disturbed_by": ""}, "rounds": 3, "results": [row, row]}

    def section():
        (tmp_path / "step_time.json").write_text(json.dumps(record))
        return accuracy_page().page(tmp_path)

    assert "median error 10.0%, worst 10.0%" in section()
    assert "The machine was quiet." in section()
    record["results"] = [row, {**row, "disturbed_by": "others"}]
    assert "other processes disturbed 1 of 2 rows" in section()
