"""Predicts every published figure of seconds, and says how far off the half was that no fit has seen.

    python -m benchmarks.published.seconds [--remember FILE] [--output FILE]

Writes benchmarks/results/published_seconds.json, of which docs/accuracy.md has a section.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.published import halves
from benchmarks.published.fit_seconds import remembered_work
from benchmarks.published.predicted_seconds import predicted, roofline_of

OUTPUT = Path(__file__).parents[1] / "results" / "published_seconds.json"
APART = 0.05  # of a token's seconds: variants nearer to one another have no order worth the name

Judged = dict[str, Any]


def judged_rows(remember: Path | None) -> list[Judged]:
    """Every row that a dry run can say, with what is predicted for it."""
    work = remembered_work(halves.rows(), remember)
    return [
        {**row, "predicted": predicted(row, work[row["id"]], roofline_of(row)), "fitted": halves.is_for_fitting(row)}
        for row in halves.rows()
    ]


def summary(rows: Sequence[Judged]) -> dict[str, Any]:
    """Errors of some rows: their number, median and worst, and how many are further off than 30%."""
    errors = sorted(abs(row["predicted"] / row["seconds"] - 1) for row in rows)
    far = sum(error > 0.3 for error in errors)
    return {"rows": len(errors), "median": statistics.median(errors), "worst": errors[-1], "beyond 30%": far}


def variants(rows: Sequence[Judged]) -> Iterator[tuple[Judged, Judged]]:
    """Two steps of one model on one card, at least one of them not fitted, that differ in precision, length or batch,
    and whose tokens' seconds are told apart by the source.
    """
    for one, other in combinations([row for row in rows if row["kind"] == "step"], 2):
        same = _model(one) == _model(other) and one["card"] == other["card"]
        if same and not (one["fitted"] and other["fitted"]) and abs(_per_token(one) / _per_token(other) - 1) > APART:
            yield one, other


def in_order(one: Judged, other: Judged) -> bool:
    """Whether the faster of two steps, by the token, is predicted to be the faster."""
    faster = _per_token(one) < _per_token(other)
    return faster == (_per_token(one, "predicted") < _per_token(other, "predicted"))


def _model(row: Judged) -> tuple[Any, ...]:
    return tuple(row["config"].get(key) for key in ("case", "width", "layers"))


def _per_token(row: Judged, key: str = "seconds") -> float:
    return row[key] / (row["config"]["batch"] * row["config"]["length"])


def record(rows: Sequence[Judged]) -> dict[str, Any]:
    """All that the page shows."""
    unseen = [row for row in rows if not row["fitted"]]
    pairs = list(variants(rows))
    kept = ("id", "source", "card", "kind", "seconds", "predicted", "fitted", "communication")
    return {
        "sources": halves.sources(),
        "judged": {
            "all": summary(unseen),
            "steps": summary([row for row in unseen if row["kind"] == "step"]),
            "operators": summary([row for row in unseen if row["kind"] == "operator"]),
            "figures above 1 ms": summary([row for row in unseen if row["seconds"] > 1e-3]),
        },
        "seen": summary([row for row in rows if row["fitted"]]),
        "variants": {"pairs": len(pairs), "in order": sum(in_order(*pair) for pair in pairs)},
        "out of order": [[one["id"], other["id"]] for one, other in pairs if not in_order(one, other)],
        "rows": [{key: row[key] for key in kept if key in row} for row in rows],
        "unsaid": [{key: row[key] for key in ("id", "source", "card", "unsaid")} for row in halves.unsaid()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--remember", type=Path, help="a file to keep the dry runs in")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    found = record(judged_rows(given.remember))
    given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name in ("judged", "seen", "variants"):
        print(name, json.dumps(found[name]))


if __name__ == "__main__":
    main()
