"""The site: its generated pages name everything that there is, and none of its links is dead."""

import importlib
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import tightfit

ROOT = Path(__file__).resolve().parent.parent.parent
FIRST_LOAD = 500_000  # bytes


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("site_pages")


def test_the_python_page_has_every_public_name(site):
    shown = re.findall(r"^::: tightfit\.(\w+)$", site.python_page(), re.MULTILINE)
    assert sorted(shown) == sorted(set(tightfit.__all__) - {"__version__"})


def test_the_command_line_page_has_every_command_with_its_options(site):
    sections = dict(
        re.findall(r"^## (tightfit [\w ]+)\n(.*?)(?=^## |\Z)", site.command_line_page(), re.MULTILINE | re.DOTALL)
    )
    promised = json.loads((ROOT / "tests" / "records" / "promises.json").read_text("utf-8"))["commands"]
    assert sections.keys() >= promised.keys() - {"tightfit"}
    for command, options in promised.items():
        if command != "tightfit":
            assert {o for o in options if o.startswith("--")} <= set(re.findall(r"`(--[\w-]+)", sections[command])), (
                command
            )


def test_the_examples_of_a_command_are_one_block(site):
    train = site.command_line_page().split("\n## tightfit train\n")[1].split("\n## ")[0]
    assert train.count("```sh") == 1
    assert len(re.findall(r"^(?:tightfit|torchrun) ", train, re.MULTILINE)) > 2


def test_a_name_of_code_in_a_table_breaks_after_its_marks_and_not_within_words(site):
    name = "tests/training/test_kill.py::test_it"
    broken = "tests/<wbr>training/<wbr>test_<wbr>kill.<wbr>py::<wbr>test_<wbr>it"
    html = f"<p><code>{name}</code></p><td>x <code>{name}</code></td><td><code>chunked_loss</code></td>"
    assert site.on_page_content(html) == html.replace(f"<td>x <code>{name}", f"<td>x <code>{broken}")


@pytest.mark.parametrize(("uri", "language"), [("zh/guide.md", "zh"), ("guide.md", "en")])
def test_the_themes_words_are_in_the_language_of_the_page(site, uri, language):
    config = SimpleNamespace(theme={"language": "?"})
    site.on_page_context({}, SimpleNamespace(file=SimpleNamespace(src_uri=uri)), config)
    assert config.theme["language"] == language


def test_each_size_of_a_card_has_a_page_with_cards_and_recipes(site):
    index = site.cards_page()
    for size in site.CARD_SIZES:
        page = site.card_page(size)
        assert f"]({size}gb.md)" in index
        assert len(re.findall(r"^\| (?!recipe|---)", page, re.MULTILINE)) >= 1, size
        assert site.cards_of(size), size


def test_pages_of_the_root_are_linked_by_their_place_on_the_site(site):
    text = "[a](../CONTRIBUTING.md), [b](../CHANGELOG.md#x), [c](data.md), [d](../examples/plain_loop.py), [e](https://a.b)"
    assert site.with_links_of_the_site(text, "guide.md") == (
        "[a](contributing.md), [b](changelog.md#x), [c](data.md), `examples/plain_loop.py`, [e](https://a.b)"
    )


@pytest.mark.parametrize(
    ("link", "is_dead"),
    [
        ("b.html", False),
        ("b.html#here", False),
        ("b.html#there", True),
        ("c.html", True),
        ("#own", False),
        ("#no", True),
    ],
)
def test_a_dead_link_is_found(site, tmp_path, link, is_dead):
    (tmp_path / "a.html").write_text(f'<p id="own"><a href="{link}">x</a> <a href="https://elsewhere.org">y</a></p>')
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1>')
    assert site.dead_links(tmp_path) == ([f"a.html: {link}"] if is_dead else [])


@pytest.mark.slow  # it makes an environment of its own, from the registry
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(site):
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [*(ROOT / "site").rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"(https?:[^\"]*)", page.read_text()
        )
        assert not loaded, page
    index = (ROOT / "site" / "search" / "search_index.js").read_text("utf-8")  # no request
    assert "offloaded_adamw" in index
    assert 300_000 < first_load(ROOT / "site" / "index.html") <= FIRST_LOAD


def first_load(page):
    """The bytes of a page with its scripts, its search, its styles and its pictures, as they lie on the disk."""
    link = r"<(?:script|img|link)[^>]*?(?:src|href)=\"?([^\" >]+\.(?:js|css|png|svg))"
    files = {(page.parent / name).resolve() for name in re.findall(link, page.read_text("utf-8"))}
    files |= {*(page.parent / "assets" / "javascripts" / "workers").glob("*.js")}
    return sum(path.stat().st_size for path in (page, *files))
