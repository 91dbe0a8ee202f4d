"""Which test keeps which promise of docs/guarantees.md and docs/guarantees_of_trainings.md.

    python tools/kept_by.py

A promise is a line that ends with its name in a comment: `- A dry run leaves nothing. <!-- dry-run-leaves-nothing -->`.
A test keeps it by `@pytest.mark.keeps("dry-run-leaves-nothing")`, or all tests of a file by `pytestmark`.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("guarantees.md", "guarantees_of_trainings.md")
PROMISE = re.compile(r"^ *- (.*) <!-- ([a-z0-9-]+) -->$", re.MULTILINE)


def promises() -> dict[str, str]:
    """Every promise by its name. A name that stands twice is an error."""
    found = [match for page in PAGES for match in PROMISE.findall((ROOT / "docs" / page).read_text("utf-8"))]
    named = {name: text for text, name in found}
    assert len(named) == len(found), "a promise's name stands twice"
    return named


def kept() -> dict[str, list[str]]:
    """The tests that keep each promise, as pytest names them."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test, names in _marked(ast.parse(path.read_text("utf-8"))):
            for name in names:
                found.setdefault(name, []).append(f"{path.relative_to(ROOT)}{test and '::' + test}")
    return found


def _marked(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Each marked test with the names that it keeps; "" for a whole file."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "pytestmark":
            yield "", _names(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.decorator_list:
            yield node.name, [name for decorator in node.decorator_list for name in _names(decorator)]


def _names(marker: ast.expr) -> list[str]:
    calls = [node for node in ast.walk(marker) if isinstance(node, ast.Call)]
    marks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "keeps"]
    return [argument.value for call in marks for argument in call.args if isinstance(argument, ast.Constant)]


def table(promised: Mapping[str, str], tests: Mapping[str, list[str]]) -> str:
    """One row for each promise, as Markdown."""
    rows = (f"| {text} | {', '.join(f'`{test}`' for test in tests.get(name, []))} |" for name, text in promised.items())
    return "\n".join(["| promise | kept by |", "|---|---|", *(row.replace("](", "](../") for row in rows)]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(promises(), kept()))
