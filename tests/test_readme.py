"""What the README shows is true: its Python runs, its commands and files exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from command_line import tightfit
from models_by_name import VOCABULARY, decoder
from tightfit.step import TokenBatch

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands():
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tightfit ")]


def test_the_python_of_the_readme_runs_in_anybodys_loop():
    model = decoder()
    before = [p.detach().clone() for p in model.parameters()]
    names = {
        "model": model,
        "batch": TokenBatch(4, 64, VOCABULARY).tensors(),
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    for block in blocks("python"):
        exec(block, names)
    plan = names["plan"]
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_readme_exist_with_their_options(line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, command, *arguments = shlex.split(line)
    help_text = tightfit(command, "--help")
    assert help_text.code == 0
    for option in (a for a in arguments if a.startswith("--")):
        assert re.search(rf"{option}\s", help_text.out), option


def test_the_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"\bmake ([a-z-]+)", "\n".join(blocks("sh")))
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_files_and_pages_that_the_readme_names_exist():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    files = re.findall(r"\b(examples/[\w.]+)", TEXT)
    assert links
    assert files
    for name in {*links, *files}:
        assert (ROOT / name).exists(), name


def test_the_levers_of_the_readme_are_the_planners():
    from tightfit.planner.levers import lever_types

    table = TEXT.split("## Levers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z-]+(?: [a-z-]+)*) \| (?!changes)", table, re.MULTILINE)
    assert {row.replace(" ", "_").replace("-", "_").removesuffix("es") for row in rows} == {
        kind.name for kind in lever_types()
    }


def test_the_tests_that_the_guarantees_name_exist():
    path = None
    named = re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", (ROOT / "docs" / "guarantees.md").read_text("utf-8"))
    assert named
    for file, test in named:
        path = ROOT / file if file else path
        assert path is not None
        assert f"def {test}(" in path.read_text("utf-8"), f"{path}::{test}"
