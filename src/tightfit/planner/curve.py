"""What memory costs in time: the trade-off curve of a step, as data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tightfit.planner.records import CurvePoint


@dataclass(frozen=True)
class Curve:
    """The ways to run a step that are worth having, and fixed recipes beside them; all traced as applied.

    `points` run from the fastest to the least peak: bytes fall and seconds rise strictly from one to the next.
    `recipes` are what is done without a plan: no lever, every block recomputed, every second one, chunked loss, both.
    """

    points: tuple[CurvePoint, ...]
    recipes: tuple[CurvePoint, ...]

    def within(self, budget_bytes: int) -> CurvePoint | None:
        """The fastest point whose peak is at most the budget; None where there is none."""
        return next((point for point in self.points if point.peak_bytes <= budget_bytes), None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return cls(**{name: tuple(CurvePoint(**point) for point in raw[name]) for name in ("points", "recipes")})

    def to_json(self, path: str | Path) -> None:
        """Write the curve to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def to_png(self, path: str | Path) -> None:
        """Draw peak against step time, with the recipes. Raises `InputError` where matplotlib is not installed."""
        from tightfit.report.picture import curve_picture

        Path(path).write_bytes(curve_picture(self.points, self.recipes))

    def __str__(self) -> str:
        from tightfit.planner.describe import describe_curve

        return describe_curve(self)


def frontier(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Those that no other equals or beats in both peak and seconds, from the fastest to the least peak."""
    best: list[CurvePoint] = []
    for point in sorted(points, key=lambda p: (p.step_seconds, p.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return tuple(best)
