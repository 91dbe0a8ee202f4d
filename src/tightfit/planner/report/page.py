"""Writes the HTML page: one self-contained file with the memory of a step, the trade-off curve, and the tables.

plotly draws the charts. Its script is written into the page (about 5 MB), so the page opens offline.
"""

import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from tightfit.errors import InputError
from tightfit.planner.records import BlockChoice, CurvePoint, Rejected, StepFigures
from tightfit.planner.report import tables
from tightfit.planner.report.picture import BUDGET_COLOUR, COLOURS, CURVE_COLOUR, INSTALL_HINT
from tightfit.planner.report.words import short

# Recipes differ by symbol and by colour. There are as many symbols as recipes.
RECIPE_SYMBOLS = ("circle", "square", "diamond", "triangle-down", "triangle-up")
RECOMPUTE_TINT = "rgba(86, 180, 233, 0.28)"
RECIPE_COLOURS = ("#999999", "#56B4E9", "#009E73", "#E69F00", "#CC79A7")


@dataclass(frozen=True)
class Page:
    """The content of a page. `planned` is None if there is only one step to show."""

    title: str
    lead: Sequence[str]
    facts: Sequence[tuple[str, str, str]]  # name, figure, remark
    plain: StepFigures
    plain_name: str
    planned: StepFigures | None = None
    planned_name: str = ""
    budget_bytes: int | None = None
    measured_peak_bytes: int | None = None
    points: Sequence[CurvePoint] = ()
    recipes: Sequence[CurvePoint] = ()
    choices: Sequence[BlockChoice] = ()
    rejected: Sequence[Rejected] = ()
    notes: Sequence[str] = ()
    setting: str = ""


def render(page: Page) -> str:
    """The page as HTML. Raises `InputError` if plotly is not installed."""
    parts = {
        "title": escape(page.title),
        "style": _asset("page.css"),
        "body": body(page),
        "data": json.dumps(data(page)).replace("<", "\\u003c"),  # no `</script>` inside a script
        "plotly": _plotly(),
        "script": _asset("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], _asset("page.html"))


def _asset(name: str) -> str:
    return importlib.resources.files("tightfit.planner.report").joinpath(name).read_text(encoding="utf-8").rstrip()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise InputError(f"a page needs the package plotly: {INSTALL_HINT}") from error
    return get_plotlyjs()


def data(page: Page) -> dict[str, Any]:
    """The data that the page's script draws."""
    steps = [_step(page.plain)] + ([] if page.planned is None else [_step(page.planned)])
    steps[-1]["measured"] = page.measured_peak_bytes
    return {
        "steps": steps,
        "categories": list(COLOURS),
        "colours": COLOURS,
        "budget": page.budget_bytes,
        "recompute_tint": RECOMPUTE_TINT,
        "budget_colour": BUDGET_COLOUR,
        "curve_colour": CURVE_COLOUR,
        "points": [asdict(point) for point in page.points],
        "recipes": [asdict(recipe) for recipe in page.recipes],
        "recipe_symbols": RECIPE_SYMBOLS,
        "recipe_colours": RECIPE_COLOURS,
        "chosen": None if page.planned is None else page.planned.peak_bytes,
    }


def _step(step_figures: StepFigures) -> dict[str, Any]:
    return {
        "peak": step_figures.peak_bytes,
        "timeline": {category: list(levels) for category, levels in step_figures.timeline.items()},
        "phases": step_figures.timeline_phases,
        "operators": [short(name) for name in step_figures.timeline_operators],
        "modules": step_figures.timeline_modules,
        "measured": None,
    }


def body(page: Page) -> str:
    """The body of the page: headings, places for charts, and tables."""
    sections = [
        _head(page),
        _timelines(page),
        _section("What the peak is made of", tables.peak(page.plain, page.planned)),
    ]
    if page.points:
        sections.append(_curve(page))
    if any(choice.action != "keep" for choice in page.choices):
        sections.append(_section("What each block does", tables.blocks(page.choices)))
    sections.append(_largest(page))
    if page.rejected:
        sections.append(
            _section("Rejected levers, and what they would have given", tables.rejected(page.rejected, page.plain))
        )
    if page.notes:
        sections.append(_section("Assumed", "".join(f"<p>{escape(note)}.</p>" for note in page.notes)))
    sections.append(f"<footer><p>{escape(page.setting)}</p></footer>")
    return "\n".join(sections)


def _section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{content}\n</section>"


def _head(page: Page) -> str:
    lead = "\n".join(f"<p>{escape(line)}</p>" for line in page.lead)
    facts = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}<small>{escape(remark)}</small></dd></div>"
        for name, figure, remark in page.facts
    )
    return f'<header>\n<h1>{escape(page.title)}</h1>\n{lead}\n<dl class="facts">\n{facts}\n</dl>\n</header>'


def _timelines(page: Page) -> str:
    names = [page.plain_name] + ([] if page.planned is None else [page.planned_name])
    charts = "\n".join(
        f'<div><h3>{escape(name)}</h3><div class="chart" id="step-{index}" role="img" '
        f'aria-label="Memory over the operators of a step: {escape(name)}"></div></div>'
        for index, name in enumerate(names)
    )
    shown = [page.plain, *([] if page.planned is None else [page.planned])]
    held = {category: COLOURS[category] for category in COLOURS if any(any(f.timeline[category]) for f in shown)}
    if any("recompute" in step_figures.timeline_phases for step_figures in shown):
        held["recomputing (behind)"] = RECOMPUTE_TINT
    return _section("Memory over a step", f'{_legend(held, page.budget_bytes)}\n<div class="charts">\n{charts}\n</div>')


def _legend(colours: Mapping[str, str], budget_bytes: int | None) -> str:
    items = [f'<li style="--swatch: {colour}">{escape(name)}</li>' for name, colour in colours.items()]
    if budget_bytes is not None:
        items.append(f'<li class="stroke" style="--swatch: {BUDGET_COLOUR}">budget</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _curve(page: Page) -> str:
    chosen = None if page.planned is None else page.planned.peak_bytes
    names = {recipe.levers: colour for recipe, colour in zip(page.recipes, RECIPE_COLOURS, strict=False)}
    return _section(
        "What memory costs in time",
        "<p>The line connects the plans for falling budgets. The other marks are fixed recipes. Every point was traced "
        f"as applied.</p>\n{_legend({'plans': CURVE_COLOUR, **names}, page.budget_bytes)}\n"
        '<div class="chart" id="curve" role="img" aria-label="Step time against peak memory"></div>\n'
        f"{tables.curve(page.points, page.recipes, chosen)}",
    )


def _largest(page: Page) -> str:
    shown = page.plain if page.planned is None else page.planned
    content = tables.largest(shown)
    if page.planned is not None:
        content += (
            f"\n<details><summary>The same for the plain step</summary>\n{tables.largest(page.plain)}\n</details>"
        )
    return _section("The largest tensors at the peak", content)
