"""README.zh-CN.md has what README.md has: the same commands, code, pictures, links and figures, in the same order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh-CN.md"))
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(text):
    return re.sub(r"\s+", " ", BLOCK.sub("", text))


def test_every_block_of_code_is_the_same():
    assert BLOCK.findall(CHINESE) == BLOCK.findall(ENGLISH)
    assert len(BLOCK.findall(ENGLISH)) > 5


def test_pictures_and_pages_are_the_same():
    link = re.compile(r"\]\(([^)]+)\)")
    assert sorted(set(link.findall(CHINESE)) - {"README.md"}) == sorted(
        set(link.findall(ENGLISH)) - {"README.zh-CN.md"}
    )


def test_there_are_as_many_headings_and_items():
    for line in (r"^## ", r"^- ", r"^\| "):
        assert len(re.findall(line, CHINESE, re.MULTILINE)) == len(re.findall(line, ENGLISH, re.MULTILINE)), line


@pytest.mark.parametrize("pattern", [r"`[^`]+`", r"\d[\d.,]*\d%?|\d%?"], ids=["code", "figures"])
def test_code_and_figures_in_the_text_are_the_same(pattern):
    found = [{each.strip(".,") for each in re.findall(pattern, prose(text))} for text in (CHINESE, ENGLISH)]
    assert found[0] == found[1], found[0] ^ found[1]
