"""What importing costs: asked of a fresh interpreter each time."""

import json
import subprocess
import sys

HEAVY = ("torch", "numpy", "transformers", "pydantic", "rich", "typer", "matplotlib", "highspy")


def fresh(code):
    """What `code` prints as JSON in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_tightfit_imports_nothing_heavy():
    code = "import json, sys, tightfit; print(json.dumps(sorted(sys.modules)))"
    assert not set(fresh(code)) & set(HEAVY)


def test_the_help_of_every_command_is_shown_without_torch():
    code = (
        "import contextlib, io, json, sys\n"
        "from tightfit.cli.app import app\n"
        "for args in (['--help'], ['plan', '--help'], ['train', '--help'], ['--version']):\n"
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
