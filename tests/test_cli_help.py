import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import transformers
import typer

import tightfit as package
from command_line import tightfit
from tightfit import cli
from tightfit.names import OPTIMIZERS
from tightfit.planner.levers import lever_types

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 300,
}  # fmt: skip
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


@pytest.mark.parametrize("command", [*COMMANDS, "runs show", "runs compare", "distil", "export", "quantise"])
def test_no_word_of_the_help_is_cut_at_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = tightfit(*command.split(), "--help").out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


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


QUESTIONS = ("estimate", "plan", "verify", "devices", "fit")


def examples(command):
    """The commands that a help text shows."""
    out = tightfit(command, "--help").out
    return [shlex.split(line) for line in re.findall(r"^ tightfit (.+?) *$", out, re.MULTILINE)]


@pytest.fixture
def a_readers_folder(tmp_path, monkeypatch):
    """The files that the examples name, small ones."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "llama-8b.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 8192}))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "SmolLM2-135M")
    monkeypatch.chdir(tmp_path)
    asked = ("--model", "./SmolLM2-135M", "--seq-len", 256)
    assert tightfit("plan", *asked, "--budget", "2x", "--output", "plan.json").code == 0


@pytest.mark.slow  # plans of the quickstart with their curve, an 8B with all its recipes: some minutes
@pytest.mark.parametrize("command", QUESTIONS)
def test_the_examples_of_a_help_text_run_as_they_stand(command, a_readers_folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    shown = examples(command)
    assert shown
    for example in shown:
        done = tightfit(*example)
        assert done.code == 0, (example, done.err)


OTHERS = {
    "--host": {"ADDRESS", "NAME"},
    "--output": {"FILE", "FOLDER"},
    "--prompt": {"NAME", "TEXT"},
    "--to": {None, "METHOD"},
}  # other things


def test_an_option_takes_the_same_kind_of_value_in_every_command():
    kinds, helps = {}, {}

    def walk(command):
        for parameter in command.params:
            for option in (name for name in (*parameter.opts, parameter.metavar) if name):
                kinds.setdefault(option, set()).add(parameter.metavar)
                helps.setdefault(option, set()).add(getattr(parameter, "help", None))
        for below in getattr(command, "commands", {}).values():
            walk(below)

    walk(typer.main.get_command(cli.app.app))
    assert {name: kind for name, kind in kinds.items() if name.startswith("--") and len(kind) > 1} == OTHERS
    assert all(len(helps[name]) == 1 for name in ("--json", "--resume", "--html", "--levers", "--optimizer"))
