"""The Chinese pages have what the English ones have: the same commands, code, pictures, links and figures, in order."""

import re
from collections import Counter
from itertools import pairwise
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
ONLY_ENGLISH = {"compression_results.md"}  # guides that a command writes
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
    assert bool(BLOCK.findall(read(english))) == ("```" in read(english))


@pairs
def test_each_links_to_the_other(english, chinese):
    for name, other in ((english, chinese), (chinese, english)):
        found = re.search(r"^(?:English \| \[简体中文\]|\[English\])\(([^)]+)\)", read(name), re.MULTILINE)
        assert found is not None
        assert ((ROOT / name).parent / found[1]).resolve() == ROOT / other


@pairs
def test_a_chinese_page_leads_to_chinese_pages_where_there_are_some(english, chinese):
    targets = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", read(chinese).partition("简体中文")[2])
    left = {((ROOT / chinese).parent / target).resolve() for target in targets if "://" not in target}
    assert not {str(page.relative_to(ROOT)) for page in left} & PAIRS.keys()


def test_every_guide_of_the_site_is_in_chinese_in_the_same_place():
    guides = re.search(r"^  - Guides:\n((?:      .*\n)+)", read("mkdocs.yml"), re.MULTILINE)
    chinese = re.search(r"^  - 中文:\n((?:      .*\n)+)", read("mkdocs.yml"), re.MULTILINE)
    assert guides is not None
    assert chinese is not None
    pages = [page for page in re.findall(r"\S+\.md", guides[1]) if page not in ONLY_ENGLISH]
    assert re.findall(r"\S+\.md", chinese[1]) == [f"zh/{page}" for page in ("index.md", "start.md", *pages)]


@pairs
def test_a_line_ends_only_where_a_space_may_be_since_browsers_show_one(english, chinese):
    lines = BLOCK.sub("\n", read(chinese)).splitlines()
    wide = r"[\u2e80-\u9fff\uff00-\uffef“”]"
    broken = [
        line
        for line, after in pairwise(lines)
        if not line.startswith(("#", "|"))
        and after.strip()
        and not re.match(r"\s*-\s", after)
        and ((re.search(rf"{wide}$", line) and re.match(rf"\s*{wide}", after)) or re.search(r"[，。；：、]$", line))
    ]
    assert not broken


@pairs
def test_pictures_and_pages_are_the_same(english, chinese):
    assert linked(chinese) == linked(english)


@pairs
def test_headings_items_and_rows_are_in_the_same_order(english, chinese):
    found = [re.findall(r"^(#+|-|\|) ", BLOCK.sub("", read(name)), re.MULTILINE) for name in (chinese, english)]
    assert found[0] == found[1]


@pairs
@pytest.mark.parametrize("pattern", [r"`[^`]+`", r"\d[\d.,]*\d%?|\d%?"], ids=["code", "figures"])
def test_code_and_figures_in_the_text_are_the_same(english, chinese, pattern):
    found = [Counter(each.strip(".,") for each in re.findall(pattern, prose(name))) for name in (chinese, english)]
    assert found[0] == found[1]
