"""The answers as HTML: the memory bar, timelines, the curve and tables. Charts are boxes in per cent, so they fit any
width without a script, and their labels keep their size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tightfit.planner.outcome import CurveRecord, EstimateRecord, PlanRecord
from tightfit.planner.records import CurvePoint, StepFigures
from tightfit.planner.report import tables
from tightfit.planner.report.picture import BUDGET_COLOUR, COLOURS, CURVE_COLOUR
from tightfit.planner.report.plan_tables import device_room, used_levers
from tightfit.planner.report.words import arithmetic, short, where, without_folders
from tightfit.recipes.records import Outcome, RecipesRecord
from tightfit.recipes.table import shown_of
from tightfit.units import format_bytes, format_count, format_seconds, parse_budget

ROOM = 1.04  # of a bar or a chart beyond its largest value
COLUMNS = 150  # of a timeline that show figures under the pointer
TINTS = {"forward": "", "backward": "back", "recompute": "again", "optimizer": ""}
RECIPE_MARKS = ("○", "□", "◇", "▽", "△")
LEAST_NAMED = 8  # per cent of a timeline's width that a phase needs for its name


@dataclass(frozen=True)
class Bar:
    """One line of the memory bar. `taken_bytes` is all that the step takes of the card, by the same rule that decides
    whether it fits: `context_bytes` and what the allocator keeps stand beside the tensors.
    """

    name: str
    remark: str
    step: StepFigures
    taken_bytes: int
    context_bytes: int

    @property
    def slack_bytes(self) -> int:
        """The bytes that the allocator reserves beyond the tensors."""
        return max(self.taken_bytes - self.context_bytes - self.step.peak_bytes, 0)


# The head: verdict, bar, legend


def headline(
    estimate: EstimateRecord, plan: PlanRecord | None, refusal: str | None, doing: str, budget: str = "100%"
) -> str:
    """The verdict in a line, and what it is about. `doing` is what is still being done, empty at the end."""
    room = estimate.device
    if budget != "100%":
        room = f"{format_bytes(_budget_bytes(estimate, budget))} on {room}"
    if refusal is not None:
        kind, verdict = "no", f"Does not fit {room}"
    elif plan is None and doing:
        kind, verdict = "wait", doing
    elif plan is None:
        kind, verdict = ("yes", f"Fits {room}") if estimate.fits else ("no", f"Does not fit {room}")
    elif plan.levers:
        ratio = plan.step_seconds / plan.plain.step_seconds if plan.plain.step_seconds else 1.0
        kind, verdict = "yes", f"Fits {room} with {ratio:.2f}x the time of the plain step"
    else:
        kind, verdict = "yes", f"Fits {room} as it is"
    about = f"{format_count(estimate.parameters)} parameters"
    setting = f"{about}, {arithmetic(estimate.weights, estimate.precision)}, {estimate.optimizer}"
    more = f'<p class="faint">{escape(doing)}</p>' if doing and doing != verdict else ""
    return f'<div class="verdict {kind}"><h2>{escape(verdict)}</h2><p class="faint">{escape(setting)}</p>{more}</div>'


def sentences(plan: PlanRecord | None, refusal: str | None) -> str:
    """Sentences that say how a plan changes the step, or why there is no plan."""
    lines = [refusal] if refusal else []
    if plan is not None:
        lines += [*used_levers(plan), *device_room(plan)]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def bars(estimate: EstimateRecord, plan: PlanRecord | None, budget: str) -> str:
    """The memory of a step against the card: the plain step, and the planned one if it differs."""
    context, plain = estimate.context_bytes, estimate.step_figures
    shown = [Bar("Plain step", _seconds(plain), plain, estimate.taken_bytes, context)]
    if plan is not None and plan.planned != plan.plain:
        taken = plan.peak_bytes if plan.room is None else plan.room.taken_bytes
        shown.append(Bar("Planned step", _seconds(plan.planned), plan.planned, taken, context))
    device_bytes = estimate.device_bytes
    budget_bytes = _budget_bytes(estimate, budget)
    scale = ROOM * max(device_bytes, budget_bytes, *(bar.taken_bytes for bar in shown))
    marks, ticks = _mark("card", f"{estimate.device}: {format_bytes(device_bytes)}", device_bytes / scale)
    if abs(budget_bytes - device_bytes) > 0.005 * scale:
        mark, tick = _mark("budget", f"budget {format_bytes(budget_bytes)}", budget_bytes / scale)
        marks, ticks = marks + mark, ticks + tick
    lines = "".join(_bar(bar, scale, device_bytes, ticks) for bar in shown)
    return f'<div class="bars"><div class="marks">{marks}</div>{lines}</div>{_legend(shown)}'


def _budget_bytes(estimate: EstimateRecord, budget: str) -> int:
    return parse_budget(budget, device_bytes=estimate.device_bytes, plain_peak_bytes=estimate.peak_bytes)


def _seconds(step: StepFigures) -> str:
    return f"{format_seconds(step.step_seconds)} a step, predicted"


def _bar(bar: Bar, scale: float, device_bytes: int, ticks: str) -> str:
    parts = [(category, size, COLOURS[category], "") for category, size in bar.step.by_category.items() if size]
    parts += [
        ("reserved by the allocator", bar.slack_bytes, "", "slack"),
        ("context", bar.context_bytes, "", "context"),
    ]
    cells = "".join(
        f'<i class="{kind}" style="width:{100 * size / scale:.3f}%{f";background:{colour}" if colour else ""}" '
        f'title="{escape(name)}: {format_bytes(size)}"></i>'
        for name, size, colour, kind in parts
        if size
    )
    over = bar.taken_bytes - device_bytes
    fits = f"{format_bytes(over)} more than the card has" if over > 0 else f"{format_bytes(-over)} left"
    return (
        f'<div class="bar{" over" if over > 0 else ""}"><div class="name"><b>{escape(bar.name)}</b>'
        f"<span>{format_bytes(bar.taken_bytes)} in all, {fits}; {escape(bar.remark)}</span></div>"
        f'<div class="track">{cells}{ticks}</div></div>'
    )


def _mark(kind: str, text: str, share: float) -> tuple[str, str]:
    """A name above the bars, and its line on each of them."""
    side = "right" if share > 0.5 else "left"
    at = 100 * (1 - share) if side == "right" else 100 * share
    name = f'<span class="{kind}" style="{side}:{at:.2f}%">{escape(text)}</span>'
    return name, f'<em class="{kind}" style="left:{100 * share:.3f}%"></em>'


def _legend(shown: Sequence[Bar]) -> str:
    items = []
    for category, colour in COLOURS.items():
        sizes = [bar.step.by_category.get(category, 0) for bar in shown]
        if any(sizes):
            items.append(_item(category, f"background:{colour}", "", sizes))
    items.append(_item("reserved by the allocator", "", "slack", [bar.slack_bytes for bar in shown]))
    items.append(_item("context", "", "context", [bar.context_bytes for bar in shown]))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _item(name: str, style: str, kind: str, sizes: Sequence[int]) -> str:
    figures = " → ".join(format_bytes(size) for size in dict.fromkeys(sizes))
    return f'<li><i class="{kind}" style="{style}"></i>{escape(name)} <b>{figures}</b></li>'


# Timelines


def timelines(estimate: EstimateRecord, plan: PlanRecord | None) -> str:
    """Memory over the operators of a step, plain and planned on one scale, and the tables of the peak."""
    steps = [("Plain step", estimate.step_figures)]
    planned = None if plan is None or plan.planned == plan.plain else plan.planned
    if planned is not None:
        steps.append(("Planned step", planned))
    highest = max(step.peak_bytes for _, step in steps)
    charts = "".join(f"<div><h3>{name}</h3>{_timeline(step, highest)}</div>" for name, step in steps)
    held = {c: colour for c, colour in COLOURS.items() if any(any(step.timeline.get(c, ())) for _, step in steps)}
    names = "".join(f'<li><i style="background:{colour}"></i>{escape(c)}</li>' for c, colour in held.items())
    last = steps[-1][1]
    notes = "".join(f"<p>{escape(note)}.</p>" for note in without_folders(estimate.assumptions))
    return (
        f'<ul class="legend">{names}</ul><div class="charts">{charts}</div>'
        f"<p>The peak is in {escape(where(last))}.</p>"
        f"<h3>What the peak is made of</h3>{tables.peak(estimate.step_figures, planned)}"
        f"<h3>The largest tensors at the peak</h3>{tables.largest(last)}"
        + (f"<h3>Assumed</h3>{notes}" if notes else "")
    )


def _timeline(step: StepFigures, highest: int) -> str:
    count = len(step.timeline_phases)
    top = ROOM * highest
    under = [0] * count
    areas = []
    for category, colour in COLOURS.items():
        levels = step.timeline.get(category, ())
        if not any(levels):
            continue
        over = [low + size for low, size in zip(under, levels, strict=True)]
        points = [f"{at},{100 * (1 - level / top):.2f}" for at, level in enumerate(over)]
        points += [f"{at},{100 * (1 - level / top):.2f}" for at, level in reversed(list(enumerate(under)))]
        areas.append(f'<polygon fill="{colour}" points="{" ".join(points)}"/>')
        under = over
    phases = "".join(
        f'<span class="{TINTS.get(name, "")}" style="width:{100 * (last - first) / count:.3f}%" title="{escape(name)}">'
        f"{escape(name) if 100 * (last - first) / count >= LEAST_NAMED else ''}</span>"
        for name, first, last in runs(step.timeline_phases)
    )
    return (
        f'<div class="phases">{phases}</div><div class="chart">'
        f'<svg viewBox="0 0 {count - 1} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Memory over the operators of a step">{"".join(areas)}</svg>'
        f'<div class="columns">{_columns(step, under)}</div>'
        f'<span class="top">peak {format_bytes(step.peak_bytes)}</span><span class="zero">0</span></div>'
    )


def _columns(step: StepFigures, totals: Sequence[int]) -> str:
    """Figures under the pointer, where operators are known; each column says its highest point."""
    count = len(totals)
    if not step.timeline_operators:
        return ""
    width = max(1, -(-count // COLUMNS))
    cells = []
    for first in range(0, count, width):
        at = max(range(first, min(first + width, count)), key=totals.__getitem__)
        module = step.timeline_modules[at] or "top level"
        text = (
            f"{format_bytes(totals[at])} in {step.timeline_phases[at]}\n{module} · {short(step.timeline_operators[at])}"
        )
        cells.append(f'<i title="{escape(text)}"></i>')
    return "".join(cells)


def runs(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """Runs of one phase: its name, its first point and one past its last. Recompute in between is backward's."""
    found: list[tuple[str, int, int]] = []
    for at, name in enumerate(phases):
        phase = "backward" if name == "recompute" else name
        if found and found[-1][0] == phase:
            found[-1] = (phase, found[-1][1], at + 1)
        else:
            found.append((phase, at, at + 1))
    return found


# The curve


def curve(record: CurveRecord, plan: PlanRecord | None, budget_bytes: int) -> str:
    """Step time against peak memory: the plans for falling budgets, and fixed recipes."""
    chosen = None if plan is None else plan.peak_bytes
    everything = [*record.points, *record.recipes]
    return (
        "<p>The line connects the plans for falling budgets, each traced as applied. The other marks are fixed recipes "
        f"that need no plan.</p>{_scatter(record, everything, chosen, budget_bytes)}"
        f"{tables.curve(record.points, record.recipes, chosen)}"
    )


def _scatter(record: CurveRecord, everything: Sequence[CurvePoint], chosen: int | None, budget_bytes: int) -> str:
    plain = (record.recipes or record.points)[0].step_seconds or 1.0
    sizes = [point.peak_bytes for point in everything]
    times = [point.step_seconds / plain for point in everything]
    left, right = _padded(min(sizes), max(sizes))
    low, high = _padded(min(times), max(times))

    def place(point: CurvePoint) -> tuple[float, float]:
        x = 100 * (point.peak_bytes - left) / (right - left)
        return x, 100 * (point.step_seconds / plain - low) / (high - low)

    def dot(point: CurvePoint, mark: str, kind: str) -> str:
        x, y = place(point)
        text = f"{point.levers}\n{format_bytes(point.peak_bytes)}, {format_seconds(point.step_seconds)}"
        return f'<b class="{kind}" style="left:{x:.2f}%;bottom:{y:.2f}%" title="{escape(text)}">{mark}</b>'

    line = " ".join(f"{x:.2f},{100 - y:.2f}" for x, y in map(place, record.points))
    dots = "".join(dot(recipe, mark, "recipe") for recipe, mark in zip(record.recipes, RECIPE_MARKS, strict=False))
    dots += "".join(
        dot(p, "★" if p.peak_bytes == chosen else "●", "star" if p.peak_bytes == chosen else "plan")
        for p in record.points
    )
    names = "".join(
        f"<li><b>{mark}</b>{escape(recipe.levers)}</li>"
        for recipe, mark in zip(record.recipes, RECIPE_MARKS, strict=False)
    )
    budget = ""
    if left < budget_bytes < right:
        at = 100 * (budget_bytes - left) / (right - left)
        budget = (
            f'<em style="left:{at:.2f}%;border-color:{BUDGET_COLOUR}" title="budget {format_bytes(budget_bytes)}"></em>'
        )
    star = "<li><b>★</b>this plan</li>" if any(p.peak_bytes == chosen for p in record.points) else ""
    return (
        f'<div class="chart scatter"><svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Step time against peak memory"><polyline points="{line}" fill="none" stroke="{CURVE_COLOUR}" '
        f'stroke-width="2" vector-effect="non-scaling-stroke"/></svg>{budget}{dots}'
        f'<span class="top">{high:.2f}x time of plain</span><span class="zero">{low:.2f}x</span></div>'
        f'<div class="axis"><span>{format_bytes(left)}</span><span>peak memory</span>'
        f'<span>{format_bytes(right)}</span></div><ul class="legend"><li><b>●</b>plans</li>{star}{names}</ul>'
    )


def _padded(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis of amounts, none of which is below zero."""
    room = 0.1 * (high - low) or 0.05 * abs(high) or 1.0
    return max(low - room, 0.0), high + room


# Recipes


def recipes(record: RecipesRecord) -> str:
    """The recipes that fit, best first; the nearest of the others; the rest folded."""
    shown = len(shown_of(record))
    fitting, nearest, rest = record.fitting, record[len(record.fitting) : shown], record[shown:]
    text = f"<p>{escape(record.sentence)}</p>"
    if fitting:
        text += _recipes(fitting, ("peak", "longest sequence", "largest batch", "step", "tokens/s"), chosen=0)
    if nearest:
        text += f"<h3>The nearest that do not fit</h3>{_recipes(nearest, ('needs',))}"
    if rest:
        least = format_bytes(min(outcome.needed_bytes for outcome in rest))
        text += f"<details><summary>{len(rest)} more, from {least}</summary>{_recipes(rest, ('needs',))}</details>"
    return f'<div class="recipes">{text}{"".join(f"<p>{escape(note)}</p>" for note in record.notes)}</div>'


def _recipes(outcomes: Sequence[Outcome], figures: Sequence[str], chosen: int | None = None) -> str:
    columns = ("recipe", "changes", *figures)
    rows = [_recipe(outcome, figures) for outcome in outcomes]
    return tables.table(columns, rows, texts=2, chosen=chosen)


def _recipe(outcome: Outcome, figures: Sequence[str]) -> tuple[str, ...]:
    def figure(value: object) -> str:
        return "" if value is None else str(value)

    levers = f"; levers {', '.join(outcome.levers).replace('_', ' ')}" if outcome.levers else ""
    cells = {
        "peak": format_bytes(outcome.peak_bytes),
        "needs": format_bytes(outcome.needed_bytes),
        "step": "" if outcome.step_seconds is None else format_seconds(outcome.step_seconds),
        "tokens/s": "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}",
        "longest sequence": figure(outcome.longest_sequence),
        "largest batch": figure(outcome.largest_batch),
    }
    return outcome.name, f"{outcome.changes}{levers}", *(cells[name] for name in figures)


# Lines


def failure(line: str, head: str = "No answer") -> str:
    """An error, in one line."""
    return f'<div class="verdict no" role="alert"><h2>{escape(head)}</h2><p>{escape(line)}</p></div>'


def waiting(line: str) -> str:
    """A line that says how far the page's answer is."""
    return f'<div class="verdict wait"><h2>{escape(line)}</h2></div>'


def paragraphs(lines: Iterable[str]) -> str:
    return "".join(f'<p class="faint">{escape(line)}</p>' for line in lines)
