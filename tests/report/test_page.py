"""The page is one file that needs nothing else, holds every figure, and can be read on a phone."""

import json
import shutil
import sys
from html.parser import HTMLParser

import pytest

import tightfit
from tightfit.errors import InputError
from tightfit.planner.report import tables
from tightfit.planner.report.plan_page import plan_page
from tightfit.units import format_bytes
from tiny import decoder, token_batch

VOID = {"meta", "link", "br", "img", "input", "hr", "wbr"}


class Parsed(HTMLParser):
    """Tags must nest; keeps the attributes of every tag, the text outside of scripts, and the scripts."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.tags and self.tags[-1][0] == "wbr":
            self.texts[-1] += data.strip()
            self.tags[-1] = ("joined", {})
        elif self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data.strip())

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def plan():
    return tightfit.plan(
        decoder(num_layers=2), token_batch(8), "0.8x", levers=["recompute", "chunked_loss"], curve=True
    )


@pytest.fixture(scope="module")
def html(plan, tmp_path_factory):
    file = tmp_path_factory.mktemp("pages") / "plan.html"
    plan.to_html(file)
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Parsed(html)


@pytest.mark.keeps("html-page-fetches-nothing")
def test_nothing_is_fetched(page, html):
    loading = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "srcset")]
    assert loading == ["data:,"]
    style = html.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert len(html) < 6_000_000


@pytest.mark.keeps("html-page-fetches-nothing")
def test_every_figure_of_the_plan_is_in_the_tables(page, plan):
    text = " ".join(page.texts)
    for size in (plan.peak_bytes, plan.plain_peak_bytes, plan.budget_bytes):
        assert format_bytes(size) in text
    for point in (*plan.curve.points, *plan.curve.recipes):
        assert point.levers in page.texts
        assert format_bytes(point.peak_bytes) in text
    for rejected in plan.rejected:
        assert rejected.reason in page.texts
    assert {group.name or "top level" for group in plan.planned.top} <= set(page.texts)


def test_the_charts_have_the_records_of_the_plan(page, plan):
    plain, planned = page.data["steps"]
    assert planned["peak"] == plan.peak_bytes
    assert tuple(plain["timeline"]["activations"]) == plan.plain.timeline["activations"]
    assert len(plain["operators"]) == len(plain["modules"]) == len(plain["phases"])
    assert page.data["budget"] == plan.budget_bytes
    assert page.data["points"][0]["peak_bytes"] == plan.curve.points[0].peak_bytes
    assert {attrs.get("id") for _, attrs in page.tags} >= {"step-0", "step-1", "curve", "data"}


def test_a_long_name_breaks_after_its_dots(page):
    names = [text for text in page.texts if text.startswith("layers.*.mlp.")]
    assert names
    html = tables.table(("tensors",), [("layers.*.mlp.weight exp_avg",), ("0.5x of 3.1. <b>",)])
    assert "layers.<wbr>*.<wbr>mlp.<wbr>weight exp_avg" in html
    assert "0.5x of 3.1. &lt;b&gt;" in html


def test_every_cell_names_its_column_for_narrow_screens(page):
    assert all(attrs.get("data-label") is not None for tag, attrs in page.tags if tag == "td")


def test_light_and_dark_are_the_readers_choice(html, page):
    assert "prefers-color-scheme: dark" in html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_an_estimate_is_a_page_too(tmp_path):
    estimate = tightfit.estimate(decoder(), token_batch())
    estimate.to_html(tmp_path / "estimate.html")
    page = Parsed((tmp_path / "estimate.html").read_text())
    assert format_bytes(estimate.peak_bytes) in " ".join(page.texts)
    assert len(page.data["steps"]) == 1
    assert page.data["points"] == []


def test_names_of_modules_cannot_break_the_page(plan):
    from dataclasses import replace

    evil = "</script><b>&"
    modules = (evil,) * len(plan.plain.timeline_modules)
    broken = replace(plan, batch=evil, plain=replace(plan.plain, timeline_modules=modules, peak_module=evil))
    page = Parsed(plan_page(broken))
    assert page.data["steps"][0]["modules"][0] == evil
    assert not any(tag == "b" for tag, _ in page.tags)


def test_a_measured_peak_is_shown_beside_the_predicted_one(plan):
    page = Parsed(plan_page(plan, measured_peak_bytes=plan.peak_bytes - 4))
    assert "predicted +4 bytes" in page.texts
    assert page.data["steps"][1]["measured"] == plan.peak_bytes - 4


def test_a_row_has_as_many_cells_as_there_are_columns():
    with pytest.raises(ValueError, match="zip"):
        tables.table(("a", "b"), [("only one",)])


def test_without_plotly_the_way_to_install_it_is_named(plan, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"plotly: pip install 'tightfit\[report\]'"):
        plan.to_html(tmp_path / "plan.html")
    assert not (tmp_path / "plan.html").exists()


@pytest.mark.keeps("html-page-fetches-nothing")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_it_without_errors_and_without_scrolling_sideways(html, width, scheme, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium is installed")
    (tmp_path / "plan.html").write_text(html, encoding="utf-8")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab, troubles = context.new_page(), []
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
        tab.goto((tmp_path / "plan.html").as_uri())
        tab.wait_for_selector("#curve .scatterlayer")
        drawn = tab.locator(".chart .main-svg").count()
        widths = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.close()
    assert troubles == []
    assert drawn >= 3
    assert widths[0] <= widths[1]
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 29)")
