"""Plans and estimates as tables for a terminal."""

import io
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tightfit.planner.plan import BlockChoice, Footing, Plan
from tightfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tightfit.planner.estimate import Estimate

WIDTH = 100


def rendered(*items: Table | str, width: int = WIDTH) -> str:
    """Tables and lines as text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    for item in items:
        console.print(item)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def describe_estimate(estimate: "Estimate") -> str:
    """Peak, what it is made of, where it stands, and the time."""
    footing = estimate.footing
    title = (
        f"{estimate.parameters / 1e6:.1f}M parameters, {estimate.precision}, {estimate.optimizer}, {estimate.device}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("at the peak")
    table.add_column("bytes", justify="right")
    for category, size in footing.by_category.items():
        table.add_row(category, format_bytes(size))
    table.add_section()
    table.add_row("peak", f"{format_bytes(footing.peak_bytes)} ({footing.peak_bytes:,} B)")
    table.add_row("of the device", f"{footing.peak_bytes / estimate.device_bytes:.1%}")
    table.add_row("step", format_seconds(footing.step_seconds))
    return rendered(table, f"The peak stands in {where(footing)}.", *notes(estimate.assumptions))


def describe_plan(plan: Plan) -> str:
    """Plain against planned, what each block does, and why the rest was rejected."""
    parts: list[Table | str] = [comparison(plan), *levers(plan)]
    if plan.choices:
        parts.append(block_table(plan.choices))
    if plan.rejected:
        parts.append(rejected_table(plan))
    return rendered(*parts, *notes(plan.assumptions))


def comparison(plan: Plan) -> Table:
    title = f"budget {format_bytes(plan.budget_bytes)}, {plan.precision}, {plan.optimizer}, {plan.device}"
    table = Table(title=title, title_justify="left")
    for column in ("", "plain", "planned", "planned / plain"):
        table.add_column(column, justify="left" if not column else "right")
    plain, planned = plan.plain, plan.planned

    def row(name: str, before: float, after: float, form: Callable[[Any], str]) -> None:
        share = f"{after / before:.0%}" if before else ""
        table.add_row(name, form(before), form(after), share)

    row("peak", plain.peak_bytes, planned.peak_bytes, format_bytes)
    row("step", plain.step_seconds, planned.step_seconds, format_seconds)
    table.add_section()
    for category in plain.by_category:
        row(category, plain.by_category[category], planned.by_category[category], format_bytes)
    table.add_section()
    table.add_row("peak stands in", plain.peak_phase, planned.peak_phase, "")
    table.add_row("at", plain.peak_module or "top level", planned.peak_module or "top level", "")
    return table


def levers(plan: Plan) -> list[str]:
    """The choices that concern the whole step."""
    lines = []
    if plan.micro_batches > 1:
        lines.append(f"The batch runs in {plan.micro_batches} micro-batches, weighted by their valid tokens.")
    if plan.chunked_loss is not None:
        lines.append(f"Head {plan.chunked_loss.head} and cross-entropy run in chunks; the logits are never whole.")
    return lines


def block_table(choices: Sequence[BlockChoice]) -> Table:
    """Neighbouring blocks that do the same on one line."""
    table = Table(title="blocks", title_justify="left")
    for column in ("blocks", "does", "keeps", "kept until backward", "recomputes for"):
        table.add_column(
            column, overflow="fold", justify="right" if column[0] in "kr" and column != "keeps" else "left"
        )
    for _, group in groupby(choices, key=lambda c: (c.action, c.kept, c.joined)):
        same = list(group)
        first = same[0]
        name = first.path if len(same) == 1 else f"{first.path} … {same[-1].path}"
        table.add_row(
            name,
            does(first),
            kept_words(first),
            format_bytes(sum(c.kept_bytes for c in same)),
            format_seconds(sum(c.recompute_seconds for c in same)),
        )
    return table


def does(choice: BlockChoice) -> str:
    words = {"keep": "keeps all", "recompute": "recomputes all", "operators": "recomputes the rest"}[choice.action]
    return f"{words}, joined to the next" if choice.joined else words


def kept_words(choice: BlockChoice) -> str:
    """`aten.mm.default` 0, 1, 4 as `mm 0 1 4`."""
    names = groupby(choice.kept, key=lambda pair: pair[0])
    return ", ".join(f"{short(name)} {' '.join(str(o) for _, o in pairs)}" for name, pairs in names)


def short(name: str) -> str:
    """`aten.mm.default` as `mm`; the long names of attention kernels as `attention`."""
    plain = name.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
    return "attention" if "scaled_dot_product" in plain else plain


def rejected_table(plan: Plan) -> Table:
    table = Table(title="not taken", title_justify="left")
    for column in ("levers", "peak", "step", "why"):
        table.add_column(column, overflow="fold", justify="right" if column in ("peak", "step") else "left")
    for rejected in plan.rejected:
        peak = "" if rejected.peak_bytes is None else format_bytes(rejected.peak_bytes)
        step = "" if rejected.step_seconds is None else format_seconds(rejected.step_seconds)
        table.add_row(rejected.levers, peak, step, rejected.reason)
    return table


def where(footing: Footing) -> str:
    """Phase, module and operator of the peak."""
    return f"{footing.peak_phase}, {footing.peak_module or 'top level'}, {short(footing.peak_operator)}"


def notes(assumptions: Sequence[str]) -> list[str]:
    return [f"Note: {assumption}." for assumption in assumptions]
