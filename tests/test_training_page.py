"""docs/training.md: its configurations and commands, run in their order with fewer steps."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from command_line import tightfit

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "training.md").read_text("utf-8")
STEPS = "training.max_steps=6"  # more than the warm-up


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands():
    return [shlex.split(line)[1:] for block in blocks("sh") for line in block.splitlines()]


@pytest.mark.slow  # five trainings, two of them planned, and what is done with them: half a minute
def test_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for block in blocks("yaml"):
        if name := re.match(r"# (\S+\.yaml)\n", block):  # others are parts of a configuration
            Path(name[1]).write_text(block)
    for command in commands():
        fewer = [STEPS] if command[0] == "train" else []
        done = tightfit(*command, *fewer)
        assert done.code == 0, (command, done)
    assert Path("losses.png").stat().st_size > 1000
    assert Path("exported/model.safetensors").is_file()


def test_it_has_a_training_for_each_objective():
    objectives = {"objective: causal", "examples/chats.jsonl", "examples/preferences.jsonl", "objective: grpo"}
    assert all(each in TEXT for each in objectives)
    assert sum(command[0] == "train" for command in commands()) == 5
