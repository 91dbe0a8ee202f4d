import re
from pathlib import Path

import pytest

import tightfit as package
from command_line import tightfit
from tightfit import cli
from tightfit.names.optimizers import OPTIMIZERS
from tightfit.planner.levers import lever_types

COMMANDS = (
    "train",
    "plan",
    "estimate",
    "verify",
    "fit",
    "explore",
    "generate",
    "score",
    "prune",
    "runs",
    "profile",
    "doctor",
    "devices",
    "calibrate",
    "minimind",
)


def test_the_version_is_the_packages():
    assert tightfit("--version").out == f"tightfit {package.__version__}\n"


def test_help_names_every_command_and_the_exit_codes():
    out = tightfit("--help").out
    for command in COMMANDS:
        assert re.search(rf"│ {command}\s", out)
    assert "3 no plan fits the budget" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_an_example_of_it(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = tightfit(command, "--help").out
    assert re.search(rf"^ tightfit {command} \S", out, re.MULTILINE)
    assert "[/]" not in out


def test_no_word_of_the_help_is_lost_to_markup():
    """Square brackets are markup to rich, and what stands in them vanishes."""
    for command in COMMANDS:
        assert not re.search(r"\s\.\s", tightfit(command, "--help").out)
    assert "pip install 'tightfit[explore]'" in tightfit("explore", "--help").out
    sources = "".join(path.read_text() for path in Path(cli.__file__).parent.glob("*.py"))
    assert not re.search(r"[^\\]\[(hf|data|lightning|lowbit|report|track|explore)\]", sources), "an extra is escaped"


def test_the_help_names_every_lever_and_every_optimizer():
    out = re.sub(r"[\s│]+", " ", tightfit("plan", "--help").out)
    for name in (*(kind.name for kind in lever_types()), *OPTIMIZERS):
        assert re.search(rf"\b{name}[, ]", out), name


def test_without_a_command_the_help_is_shown():
    assert "Commands" in tightfit().out + tightfit().err
