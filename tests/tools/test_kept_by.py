"""Every promise has a test that keeps it, and every test that says so keeps a promise that is made."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def kept_by(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("kept_by")


def test_every_promise_is_kept_by_a_test_and_every_marker_names_a_promise(kept_by):
    promised, kept = kept_by.promises(), kept_by.kept()
    assert len(promised) > 300
    assert not promised.keys() - kept.keys(), "no test keeps these"
    assert not kept.keys() - promised.keys(), "nobody made these promises"


def test_every_line_of_the_pages_is_a_promise_with_a_name(kept_by):
    for page in kept_by.PAGES:
        text = (ROOT / "docs" / page).read_text("utf-8").split("\n## Not promised")[0]
        unnamed = [line for line in text.splitlines() if line.lstrip().startswith("- ") and "<!-- " not in line]
        assert not unnamed


def test_markers_of_functions_methods_and_files_are_read(kept_by):
    code = """
pytestmark = [pytest.mark.slow, pytest.mark.keeps("all")]
@pytest.mark.keeps("a", "b")
@pytest.mark.slow
def test_one(): ...
class Tests:
    @pytest.mark.keeps("c")
    def test_two(self): ...
def test_three(): ...
"""
    assert list(kept_by._marked(ast.parse(code))) == [("", ["all"]), ("test_one", ["a", "b"]), ("test_two", ["c"])]
