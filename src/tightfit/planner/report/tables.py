"""The tables of the HTML page. On a narrow screen each row becomes a card that names its columns."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from tightfit.planner.records import BlockChoice, CurvePoint, Rejected, StepFigures, TensorGroup
from tightfit.planner.report.words import alike, keeps, kept_bytes, short
from tightfit.units import format_bytes, format_seconds

Row = Sequence[str]


def table(columns: Sequence[str], rows: Iterable[Row], *, texts: int = 1, chosen: int | None = None) -> str:
    """A table. The first `texts` columns hold words, and the others figures. `chosen` is the index of a marked row."""
    names = [escape(name) for name in columns]
    kinds = ["" if index < texts else ' class="figure"' for index in range(len(columns))]
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, names, strict=True))
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(
            f'<td{kind} data-label="{name}">{_breakable(text)}</td>'
            for kind, name, text in zip(kinds, names, row, strict=True)
        )
        mark = ' class="chosen"' if index == chosen else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    body = "\n".join(lines)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _breakable(text: str) -> str:
    """Long dotted names may break after a dot, and not within a word."""
    return re.sub(r"(?<=[^\s.]\.)(?=[^\s.\d])", "<wbr>", escape(text))


def peak(plain: StepFigures, planned: StepFigures | None) -> str:
    """Bytes at the peak by category, and the place of the peak."""
    if planned is None:
        rows = [(name, format_bytes(size), share(size, plain.peak_bytes)) for name, size in plain.by_category.items()]
        return table(("at the peak", "bytes", "share"), [*rows, ("together", format_bytes(plain.peak_bytes), "100%")])
    rows = [
        (name, format_bytes(size), format_bytes(planned.by_category[name]), share(planned.by_category[name], size))
        for name, size in plain.by_category.items()
    ]
    before, after = plain.peak_bytes, planned.peak_bytes
    total = ("together", format_bytes(before), format_bytes(after), share(after, before))
    places = ("phase", plain.peak_phase, planned.peak_phase, "")
    modules = ("module", plain.peak_module or "top level", planned.peak_module or "top level", "")
    return table(("at the peak", "plain", "planned", "of plain"), [*rows, total, places, modules])


def curve(points: Sequence[CurvePoint], recipes: Sequence[CurvePoint], chosen_bytes: int | None) -> str:
    """The points of the curve, with the plan's own marked, and the recipes."""
    plain = recipes[0] if recipes else points[0]
    columns = ("peak", "of plain", "step", "of plain")

    def row(point: CurvePoint) -> Row:
        size, seconds = point.peak_bytes, point.step_seconds
        times = f"{seconds / plain.step_seconds:.3f}x" if plain.step_seconds else ""
        return point.levers, format_bytes(size), share(size, plain.peak_bytes), format_seconds(seconds), times

    marked = next((index for index, point in enumerate(points) if point.peak_bytes == chosen_bytes), None)
    return (
        table(("plans", *columns), map(row, points), chosen=marked)
        + "\n<details><summary>The fixed recipes</summary>\n"
        + table(("recipe", *columns), map(row, recipes))
        + "\n</details>"
    )


def blocks(choices: Sequence[BlockChoice]) -> str:
    """The tensors that the blocks keep and recompute. Neighbouring blocks with the same choice share a line."""
    rows = [
        (
            name,
            keeps(same[0]),
            kept_bytes(same),
            format_seconds(sum(choice.recompute_seconds for choice in same)),
        )
        for name, same in alike(choices)
    ]
    return table(("blocks", "keep for backward", "kept", "recompute"), rows, texts=2)


def largest(step_figures: StepFigures) -> str:
    """The largest groups of tensors at the peak."""
    return table(("tensors", "made by", "category", "shape", "count", "bytes"), map(_group, step_figures.top), texts=4)


def _group(group: TensorGroup) -> Row:
    made_by = short(group.operator) if group.operator else "there before the step"
    shape = f"{' × '.join(map(str, group.shape))} {group.dtype}" if group.dtype else "scratch memory"
    count = f"{group.count}" if group.count > 1 else ""
    return group.name or "top level", made_by, group.category, shape, count, format_bytes(group.bytes)


def rejected(found: Sequence[Rejected], plain: StepFigures) -> str:
    """Rejected levers, with reasons."""
    rows = [
        (
            one.levers,
            one.reason,
            "" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            "" if one.peak_bytes is None else share(one.peak_bytes, plain.peak_bytes),
            "" if one.step_seconds is None else format_seconds(one.step_seconds),
        )
        for one in found
    ]
    return table(("levers", "because", "peak", "of plain", "step"), rows, texts=2)


def share(part: float, whole: float) -> str:
    """A percentage; empty if the whole is zero."""
    return f"{part / whole:.1%}" if whole else ""
