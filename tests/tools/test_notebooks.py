"""The notebooks run from the first cell to the last, and hold what they printed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
RUN = [sys.executable, str(ROOT / "tools" / "run_notebook.py")]


@pytest.mark.slow  # an interpreter, and steps that are run: half a minute each
@notebooks
def test_every_cell_runs(path, tmp_path):
    done = subprocess.run([*RUN, path, "--check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@notebooks
def test_a_notebook_holds_what_its_cells_printed(path):
    notebook = json.loads(path.read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert bool(cell["outputs"]) == ("print(" in "".join(cell["source"]))


def test_a_cell_that_fails_is_an_error(tmp_path):
    path = tmp_path / "failing.ipynb"
    cell = {"cell_type": "code", "source": ["assert 1 == 2"], "outputs": [], "execution_count": None}
    path.write_text(json.dumps({"cells": [cell], "nbformat": 4}))
    done = subprocess.run([*RUN, path, "--check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr
