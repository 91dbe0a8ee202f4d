"""The guests' examples and pages run; none is imported for nothing, and a missing one is one line."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl

ROOT = Path(__file__).resolve().parents[2]
GUESTS = ("transformers", "accelerate", "peft", "trl", "lightning", "pytorch_lightning")
EXAMPLES = ("huggingface.py", "lightning_module.py", "accelerate_loop.py")


def fresh(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.keeps("guest-imported-before-used")
@pytest.mark.slow  # an interpreter for each library
@pytest.mark.filterwarnings("ignore")  # a user's process goes on after a warning
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_shows_its_plan(name, capsys):
    path = ROOT / "examples" / name
    assert len(path.read_text("utf-8").splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    assert "Fits: " in capsys.readouterr().out


@pytest.mark.keeps("guest-imported-before-used")
@pytest.mark.slow  # an interpreter of its own
def test_importing_tightfit_imports_no_guest():
    code = "import sys, tightfit, tightfit.integrations; tightfit.plan; print(*sys.modules)"
    assert not set(fresh("-c", code).stdout.split()) & set(GUESTS)


ABSENT = {"hf": ["transformers"], "lightning": ["lightning", "pytorch_lightning"]}


@pytest.fixture(scope="module")
def said_without():
    """What importing each integration prints where its guest is missing, asked of one fresh interpreter."""
    code = (
        "import importlib, json, sys\n"
        "from tightfit.errors import InputError\n"
        "said = {}\n"
        f"for module, absent in {ABSENT!r}.items():\n"
        "    sys.modules.update(dict.fromkeys(absent))\n"
        "    try: importlib.import_module(f'tightfit.integrations.{module}')\n"
        "    except InputError as error: said[module] = str(error)\n"
        "    for name in absent: del sys.modules[name]\n"
        "print(json.dumps(said))"
    )
    done = fresh("-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow  # an interpreter without packages
@pytest.mark.keeps("guest-imported-before-used")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("module", "command"),
    [("hf", "pip install 'tightfit[hf]'"), ("lightning", "pip install 'tightfit[lightning]'")],
)
def test_a_missing_guest_is_one_line_with_the_command_that_brings_it(module, command, said_without):
    assert command in said_without[module]
    assert len(said_without[module].strip().splitlines()) == 1


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "guests" / page).read_text("utf-8"), re.M | re.S)


@pytest.mark.keeps("guest-imported-before-used")
@pytest.mark.slow  # an interpreter of its own
def test_the_python_of_the_page_on_hugging_face_runs(tmp_path):
    from tiny_trainings import arguments, llama, padded, samples

    names = {"model": llama(), "args": arguments(tmp_path, max_steps=1), "dataset": samples(16), "collator": padded}
    for block in blocks("huggingface.md"):
        exec(block, names)
    assert names["trainer"].state.global_step == 1


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*number of training batches.*")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")
def test_the_python_of_the_page_on_lightning_runs():
    from test_lightning import batches, module_class

    def quiet_trainer(**settings):
        return pl.Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False, **settings)

    kind = module_class(pl)
    names = {"Trainer": quiet_trainer, "Model": kind, "model": kind(), "loader": batches(4)}
    for block in blocks("lightning.md"):
        exec(block, names)
    assert names["model"].gradient_checkpointing
    assert names["trainer"].global_step == 2
