"""What importing costs, asked of a fresh interpreter each time; and packages that may not be there."""

import ast
import gc
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import tightfit
from tightfit.cli.waiting import seldom_collecting
from tightfit.runtime.idle_lines import IDLE, leave_out_idle_lines

HEAVY = ("torch", "numpy", "transformers", "pydantic", "rich", "typer", "matplotlib", "highspy")


def fresh(code):
    """What `code` prints as JSON in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.keeps("import-tightfit-tightfit-help")
def test_importing_tightfit_imports_nothing_heavy():
    code = "import json, sys, tightfit; print(json.dumps(sorted(sys.modules)))"
    assert not set(fresh(code)) & set(HEAVY)


@pytest.mark.keeps("import-tightfit-tightfit-help")
def test_the_help_of_every_command_is_shown_without_torch():
    code = (
        "import contextlib, io, json, sys\n"
        "from tightfit.cli.app import app\n"
        "commands = ('plan', 'train', 'score', 'runs')\n"
        "for args in (['--help'], *([name, '--help'] for name in commands), ['--version']):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        app(args)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    modules = fresh(code)
    assert "typer" in modules
    assert not {"torch", "numpy", "transformers"} & set(modules)


def test_the_planner_imports_nothing_heavy_beside_torch():
    code = (
        "import json, sys\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import tightfit\n"
        "tightfit.plan, tightfit.estimate, tightfit.Plan\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    added = set(fresh(code))
    assert "tightfit.planner.api" in added
    assert not {"transformers", "tokenizers", "pydantic", "rich", "typer", "matplotlib", "plotly"} & added


def test_idle_lines_of_other_packages_are_left_out_and_no_others(caplog):
    leave_out_idle_lines()
    for name, text in IDLE.items():
        logging.getLogger(name).warning("of %s: %s here", name, text)
        logging.getLogger(name).warning("%s is broken", name)
    assert caplog.messages == [f"{name} is broken" for name in IDLE]


def test_an_answer_leaves_the_collector_as_it_was():
    often = gc.get_threshold()
    with seldom_collecting():
        assert gc.get_threshold()[0] > often[0]
    assert gc.get_threshold() == often


SOURCES = Path(tightfit.__file__).parent
EXTRAS = {"transformers", "peft", "accelerate", "datasets", "torchao", "bitsandbytes", "plotly", "matplotlib", "gradio"}


def _unguarded(tree):
    """Imports of packages that extras bring, outside of `try ... except ImportError` and of what type checkers read."""
    for node in ast.iter_child_nodes(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else names
        yield from ((node.lineno, name) for name in names if name.partition(".")[0] in EXTRAS)
        guards = isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h.type or h) for h in node.handlers)
        if not guards and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from _unguarded(node)


def test_every_import_of_a_package_that_an_extra_brings_says_which_one_is_missing():
    found = {
        f"{path.relative_to(SOURCES)}:{line} {name}"
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] != "integrations"  # these are imported by who has the package
        for line, name in _unguarded(ast.parse(path.read_text("utf-8")))
    }
    assert not found
    assert list(_unguarded(ast.parse("import transformers"))), "the subject"
