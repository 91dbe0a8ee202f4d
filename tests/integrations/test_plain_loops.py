"""The examples for loops of one's own run, compute what they compute without a plan, and stay within its budget."""

import json
import re
import runpy
from pathlib import Path

import pytest

from tightfit.planner.plans import Plan

ROOT = Path(__file__).resolve().parents[2]
# The part of the plain peak that is the budget, and the losses that are printed.
EXAMPLES = {
    "plain_loop": (0.5, 20),
    "nanogpt_loop": (0.6, 4),
    "custom_loss": (0.5, 20),
    "two_optimizers": (0.8, 8),
    "dreambooth_lora": (0.6, 4),
}


@pytest.fixture
def output(capsys):
    """What an example prints."""

    def run(name):
        if name == "dreambooth_lora":
            pytest.importorskip("diffusers", reason="the extra diffusion is not installed")
        capsys.readouterr()
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def losses(text):
    return [line for line in text.splitlines() if re.match(r"(loss|critic|generator) -?\d", line)]


def figures(text):
    found = re.search(r"measured peak (\d+), budget (\d+), without the plan (\d+)", text)
    assert found is not None, text
    return [int(figure) for figure in found.groups()]


@pytest.mark.keeps("half-plain-peak-twenty-steps", "examples-stay-within-budgets")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_stays_within_its_budget_and_computes_the_same(name, output, monkeypatch):
    planned = output(name)
    measured, budget, plain = figures(planned)
    part, count = EXAMPLES[name]
    assert measured <= budget == int(part * plain)
    monkeypatch.setattr(Plan, "apply", lambda plan, model: None)
    unplanned = output(name)
    assert len(losses(planned)) == count
    assert losses(planned) == losses(unplanned)  # to the last digit that Python prints
    assert figures(unplanned)[0] > budget


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_on_a_screen(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text("utf-8").splitlines()) < 60


@pytest.mark.keeps("half-plain-peak-twenty-steps")
def test_the_page_on_minimind_says_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "minimind.py"))
    record = json.loads(benchmark["OUTPUT"].read_text("utf-8"))
    assert benchmark["table"](record) in (ROOT / "docs" / "guests" / "minimind.md").read_text("utf-8")
    for found in record["results"]:
        assert found["same_output"], found["case"]
        assert found["same_saved_states"], found["case"]
        assert found["measured_bytes"] <= found["budget_bytes"] < found["plain_measured_bytes"]


@pytest.mark.parametrize("page", ["minimind", "plain_loops"])
def test_the_pages_name_files_and_flags_that_exist(page):
    from command_line import tightfit

    text = (ROOT / "docs" / "guests" / f"{page}.md").read_text("utf-8")
    assert len(text.splitlines()) < 68
    for name in re.findall(r"examples/\w+\.py", text):
        assert (ROOT / name).is_file(), name
    help_text = tightfit("minimind", "--help").out
    for flag in re.findall(r"`--(memory_budget|use_checkpoint|segments|ffn_only)", text):
        assert f"--{flag}" in help_text
