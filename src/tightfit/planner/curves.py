"""The trade-off curve of a step: peak memory against time."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tightfit.planner.outcome import CurveRecord
from tightfit.planner.records import CurvePoint


class Curve(CurveRecord):
    """A curve that can be printed, drawn, written and read."""

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
        from tightfit.planner.report.picture import curve_picture

        Path(path).write_bytes(curve_picture(self.points, self.recipes))

    def __str__(self) -> str:
        from tightfit.planner.report.plan_tables import describe_curve

        return describe_curve(self)


def frontier(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """The points that no other one equals or beats in both peak and seconds, from the fastest to the least peak."""
    best: list[CurvePoint] = []
    for point in sorted(points, key=lambda p: (p.step_seconds, p.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return tuple(best)
