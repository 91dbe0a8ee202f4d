"""The Chinese pages have what the English ones have: the same commands, code, pictures, links and figures, in order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IN_CHINESE = ROOT / "docs" / "zh"
PAIRS = {
    "README.md": "README.zh-CN.md",
    **{
        str(Path("docs", page.relative_to(IN_CHINESE))): str(page.relative_to(ROOT))
        for page in sorted(IN_CHINESE.rglob("*.md"))
    },
}
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TABLE_OF_FIGURES = re.compile(r"^\| (?:predicted|预测什么) \|.*(?:\n\|.*)*", re.MULTILINE)  # `benchmarks/front_page.py`
pairs = pytest.mark.parametrize(("english", "chinese"), PAIRS.items(), ids=PAIRS)


def read(name):
    return (ROOT / name).read_text("utf-8")


def prose(name):
    return re.sub(r"\s+", " ", TABLE_OF_FIGURES.sub("", BLOCK.sub("", read(name))))


def linked(name):
    """What a page links to, as the English page that it is or stands for."""
    english = {(ROOT / theirs).resolve(): ours for ours, theirs in PAIRS.items()}
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", read(name))
    targets = {((ROOT / name).parent / link).resolve() for link in links if "://" not in link}
    elsewhere = {link for link in links if "://" in link}
    return sorted(
        elsewhere
        | {str(ROOT / english.get(target, target)) for target in targets}
        - {str(ROOT / n) for n in PAIRS if n == name or PAIRS[n] == name}
    )


@pairs
def test_every_block_of_code_is_the_same(english, chinese):
    assert BLOCK.findall(read(chinese)) == BLOCK.findall(read(english))
    assert BLOCK.findall(read(english))


@pairs
def test_pictures_and_pages_are_the_same(english, chinese):
    assert linked(chinese) == linked(english)


@pairs
def test_there_are_as_many_headings_and_items(english, chinese):
    for line in (r"^## ", r"^- ", r"^\| "):
        assert len(re.findall(line, read(chinese), re.MULTILINE)) == len(re.findall(line, read(english), re.MULTILINE))


@pairs
@pytest.mark.parametrize("pattern", [r"`[^`]+`", r"\d[\d.,]*\d%?|\d%?"], ids=["code", "figures"])
def test_code_and_figures_in_the_text_are_the_same(english, chinese, pattern):
    found = [{each.strip(".,") for each in re.findall(pattern, prose(name))} for name in (chinese, english)]
    assert found[0] == found[1], found[0] ^ found[1]
