"""What the README, the start and the guide show is true: Python runs, commands and files exist, figures are results."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

from command_line import tightfit
from models_by_name import VOCABULARY, decoder
from tightfit.step import TokenBatch

ROOT = Path(__file__).resolve().parent.parent
README, START, GUIDE = "README.md", "docs/start.md", "docs/guide.md"
WORDS = 700  # of the README: equinox takes 434, httpx 548
FIRST_SCREEN = 40  # lines


def read(page):
    return (ROOT / page).read_text("utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def commands():
    shown = [line for page in (README, START, GUIDE) for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in dict.fromkeys(shown) if line.startswith("tightfit ")]


def front_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("front_page")


def test_the_readme_is_read_in_a_minute():
    lines = read(README).splitlines()
    assert len(read(README).split()) <= WORDS
    first = "\n".join(lines[:FIRST_SCREEN])
    for what in ("the card you have", "front_page.png", "pip install", "tightfit fit --model", "of plans over budget"):
        assert what in re.sub(r"of \d+ plans", "of plans", first), what


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_figures_of_the_readme_are_those_of_the_results_files(language, monkeypatch):
    module = front_page(monkeypatch)
    assert module.PAGES[language].read_text("utf-8") == module.page(language), "run: python benchmarks/front_page.py"


@pytest.mark.slow  # 42 recipes of an 8B model: a minute
def test_the_answer_that_the_readme_shows_is_todays(monkeypatch):
    module = front_page(monkeypatch)
    (now, hosts), (shown, kept) = map(without_hosts, (module.answer(), module.results("front_page")["fit"]))
    assert now == shown, "run: python benchmarks/front_page.py --ask"
    assert hosts == pytest.approx(kept, rel=0.01)


def without_hosts(lines):
    """An answer's words without the memory of the host, and that: the process itself is a part of it, on each machine
    another one.
    """
    host = r"([\d.]+) GiB of the host"
    text = " ".join(" ".join(lines).split())
    return re.sub(host, "", text), [float(size) for size in re.findall(host, text)]


@pytest.mark.keeps("configuration-page-table-permitted")
@pytest.mark.parametrize("page", [README, GUIDE])
def test_the_python_of_a_page_runs_in_anybodys_loop(page):
    model = decoder()
    before = [p.detach().clone() for p in model.parameters()]
    names = {
        "model": model,
        "batch": TokenBatch(4, 64, VOCABULARY).tensors(),
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    for block in blocks(page, "python"):
        exec(block, names)
    plan = names["plan"]
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    changed = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert changed == (page == GUIDE)  # which shows the loop too


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_pages_exist_with_their_options(line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, command, *arguments = shlex.split(line)
    help_text = tightfit(command, "--help")
    assert help_text.code == 0
    for option in (a for a in arguments if a.startswith("--")):
        assert re.search(rf"{option}\s", help_text.out), option


def test_the_make_targets_of_the_readme_exist():
    makefile = read("Makefile")
    targets = re.findall(r"\bmake ([a-z-]+)", read(README))
    assert {"demo", "test", "docs"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("page", [README, START, GUIDE])
def test_the_examples_that_a_page_names_exist(page):
    files = re.findall(r"\b(examples/[\w.]+)", read(page))
    assert files
    for name in files:
        assert (ROOT / name).exists(), name


def test_the_levers_of_the_guide_are_the_planners():
    from tightfit.planner.levers import lever_types

    table = read(GUIDE).split("## Levers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z-]+(?: [a-z-]+)*) \| (?!changes)", table, re.MULTILINE)
    assert {row.replace(" ", "_").replace("-", "_").removesuffix("es") for row in rows} == {
        kind.name for kind in lever_types()
    }
