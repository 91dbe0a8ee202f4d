"""What the pages name is there: other pages, files of the repository, public names."""

import importlib
import re
from contextlib import suppress
from pathlib import Path

import pytest

import tightfit

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]
ROOM_BYTES, HOUSE_BYTES = 4096, 6144  # a newcomer reads the house, then the room
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}
SOURCES = ("", "docs", "src", "src/tightfit", "tests")  # where a name in the text may begin
OTHERS = {"model/model_minimind.py"}  # files of MiniMind's
MODULES = {"exclusions", "nullcard", "optim"}  # that pages name as a whole
pages = pytest.mark.parametrize("name", NAMES)


def prose(page):
    """The text outside of fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def linked(page):
    """The local files that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page))
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


@pytest.mark.keeps("page-file-public-name")
@pages
def test_every_link_leads_somewhere(name):
    missing = [target for target in linked(NAMES[name]) if not target.exists()]
    assert not missing


@pytest.mark.keeps("page-file-public-name")
@pages
def test_every_file_that_is_named_exists(name):
    named = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|json|yaml|toml|js|css|html))(?:::\w+)?`", prose(NAMES[name]))
    missing = [path for path in named if path not in OTHERS and not any((ROOT / at / path).exists() for at in SOURCES)]
    assert not missing


def named_in(text):
    """What a page names of the package: `tightfit.plan`, `tightfit.ops.attention`, and what it imports from there."""
    dotted = {*re.findall(r"\btightfit((?:\.[A-Za-z]\w*)+)", text)}
    imports = re.findall(r"from tightfit((?:\.\w+)*) import ([\w, ]+)", text)
    return {name.strip(".") for name in dotted} | {
        f"{module}.{name.split(' as ')[0].strip()}".strip(".") for module, names in imports for name in names.split(",")
    }


def is_public(name):
    """Whether users reach it: a public name, or something in a module."""
    first, *rest = name.split(".")
    if not rest:
        return first in tightfit.__all__
    found = tightfit
    for number, part in enumerate(parts := name.split("."), start=1):
        with suppress(ImportError):
            importlib.import_module(".".join(["tightfit", *parts[:number]]))
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.keeps("page-file-public-name")
@pages
def test_every_public_name_is_public(name):
    named = named_in(NAMES[name].read_text("utf-8"))
    assert {each for each in named if not is_public(each)} <= MODULES


def test_a_name_that_is_no_more_is_noticed():
    text = "`tightfit.plan`, `tightfit.untrace`, `tightfit.ops.atention`\n"
    text += "from tightfit.training.api import train, untrain\n"
    unknown = {each for each in named_in(text) if not is_public(each)}
    assert unknown == {"untrace", "ops.atention", "training.api.untrain"}


def test_every_page_is_linked_from_another():
    reached = {target for page in PAGES for target in linked(page) if target != page}
    assert {page for page in PAGES if (ROOT / "docs") in page.parents} <= reached


def test_the_design_is_a_page_and_a_note_beside_each_room():
    assert (ROOT / "docs" / "architecture.md").stat().st_size <= HOUSE_BYTES
    rooms = [path.parent for path in (ROOT / "src" / "tightfit").glob("*/__init__.py")]
    assert not [room.name for room in rooms if not (room / "README.md").is_file()]
    notes = (ROOT / "src").rglob("README.md")
    assert not {note: size for note in notes if (size := note.stat().st_size) > ROOM_BYTES}
