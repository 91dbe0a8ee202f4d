"""Runs the code of a notebook in this Python, cell by cell, and writes what each cell prints into it.

    python tools/run_notebook.py examples/notebooks/will_it_fit.ipynb [--check]

No kernel is needed. With `--check` nothing is written: an error in a cell is an error of the command.
"""

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> None:
    """Run the cells in their order, and keep what they print."""
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    notebook = json.loads(options.notebook.read_text("utf-8"))
    run(notebook)
    if not options.check:
        options.notebook.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
