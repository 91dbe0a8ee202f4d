"""Predicts the peaks that others have measured on graphics cards, and compares.

    python -m benchmarks.published.peaks
    python -m benchmarks.published.peaks --only litgpt rope

The rows are in peaks.json: facts, each series with its source, card and configuration. Rows of training steps are
predicted by `tightfit.estimate`, single operators by a dry run of the script that measured them (process.py). Writes
benchmarks/results/published.json; `benchmarks/accuracy_page.py` makes the table of it.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.published import litgpt
from benchmarks.published.head_losses import HEAD_LOSSES
from benchmarks.published.operators import OPERATORS
from benchmarks.published.process import CARDS, peak_of

import tightfit

HERE = Path(__file__).resolve().parent
ROWS = HERE / "peaks.json"
SCRIPTS = {**OPERATORS, **HEAD_LOSSES}
RESULTS = HERE.parent / "results" / "published.json"


@dataclass(frozen=True)
class Row:
    """One published figure: `published` in `unit`, of which one is `unit_bytes`; `digits` behind its point."""

    source: str
    work: str
    provider: str
    mode: str
    card: str
    torch: str
    date: str
    configuration: dict[str, Any]
    unit: str
    unit_bytes: int
    digits: int | None
    published: float
    kept_aside: bool
    ambiguous: str | None
    cause: str
    blas_handles: int  # of the process before
    above: bool  # beyond what was there before the run

    def predict(self) -> int:
        """Bytes, by our own code."""
        if self.work == "litgpt":
            return litgpt_step(self)
        script = SCRIPTS[self.work]
        return peak_of(
            lambda: script(self.configuration, self.mode, self.provider),
            CARDS[self.card],
            handles=self.blas_handles,
            above=self.above,
        )


def rows(path: Path = ROWS) -> Iterator[Row]:
    """Every published row."""
    content = json.loads(path.read_text("utf-8"))
    for series in content["series"]:
        source = content["sources"][series["source"]]
        for value, published in series["rows"]:
            yield Row(
                source=source["name"],
                work=series["work"],
                provider=series["provider"],
                mode=series["mode"],
                card=series["card"],
                torch=series["torch"],
                date=series["date"],
                configuration={**series["configuration"], series["sweep"]: value},
                unit=source["unit"],
                unit_bytes=source["bytes"],
                digits=source["digits"],
                published=published,
                kept_aside=series["kept_aside"],
                ambiguous=series.get("ambiguous"),
                cause=series.get("cause", ""),
                blas_handles=series.get("blas_handles", 0),
                above=source.get("above", False),
            )


def litgpt_step(row: Row) -> int:
    """A finetuning step through the public interface."""
    c = row.configuration
    model = tightfit.build_dry(lambda: litgpt.Model(c["model"], c["method"], c["length"]))
    ids = torch.zeros(c["micro_batch"], c["length"], dtype=torch.int64)
    batch = {"ids": ids, "labels": ids, "accumulated": c["batch"] // c["micro_batch"]}
    return tightfit.estimate(model, batch, loss=litgpt.Loss(), optimizer=c["optimizer"], device=row.card).peak_bytes


def compare(row: Row, predicted: int) -> dict[str, Any]:
    """The prediction beside the published figure, and whether it rounds to the published digits."""
    figure = predicted / row.unit_bytes
    return {
        "predicted": figure,
        "predicted_bytes": predicted,
        "error": figure / row.published - 1,
        "rounds_to_it": row.digits is not None and round(figure, row.digits) == row.published,
    }


def described(row: Row) -> dict[str, Any]:
    kept = ("source", "work", "provider", "mode", "card", "torch", "date", "configuration", "unit", "published")
    return {name: getattr(row, name) for name in kept} | {
        "kept_aside": row.kept_aside,
        "ambiguous": row.ambiguous,
        "cause": row.cause,
    }


def run(only: Sequence[str] = ()) -> list[dict[str, Any]]:
    results = []
    for row in rows():
        if only and row.work not in only:
            continue
        result = described(row) | compare(row, row.predict())
        results.append(result)
        what = f"{row.work} {row.mode} {row.configuration}"
        print(f"{what}: {row.published} {row.unit}, {result['error']:+.4%}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=(), help="works to predict; nothing is written then")
    only = parser.parse_args().only
    results = run(only)
    if not only:
        record = {"environment": environment(), "results": results}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
