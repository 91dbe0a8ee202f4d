"""What the pages name is there: other pages, files of the repository, public names."""

import re
from pathlib import Path

import pytest

import tightfit

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}
SOURCES = ("", "docs", "src", "src/tightfit", "tests")  # where a name in the text may begin
OTHERS = {"model/model_minimind.py"}  # files of MiniMind's
pages = pytest.mark.parametrize("name", NAMES)


def prose(page):
    """The text outside of fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def linked(page):
    """The local files that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page))
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


@pages
def test_every_link_leads_somewhere(name):
    missing = [target for target in linked(NAMES[name]) if not target.exists()]
    assert not missing


@pages
def test_every_file_that_is_named_exists(name):
    named = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|json|yaml|toml|js|css|html))(?:::\w+)?`", prose(NAMES[name]))
    missing = [path for path in named if path not in OTHERS and not any((ROOT / at / path).exists() for at in SOURCES)]
    assert not missing


@pages
def test_every_public_name_is_public(name):
    named = set(re.findall(r"\btightfit\.(\w+)", NAMES[name].read_text("utf-8")))
    modules = {path.stem for path in (ROOT / "src" / "tightfit").iterdir()}
    assert named <= {*tightfit.__all__, *modules}


def test_every_page_is_linked_from_another():
    reached = {target for page in PAGES for target in linked(page) if target != page}
    assert {page for page in PAGES if page.parent != ROOT} <= reached
