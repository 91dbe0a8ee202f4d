"""How long the measured steps of a real card would take by its published rates, which are all that one without it has.

python -m benchmarks.gpu.published_rates [--output benchmarks/results/gpu_published_rates.json]

The plain steps of gpu.json; nothing runs.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.gpu.cases import MODELS, OPTIMIZERS, Case

from tightfit import TokenBatch, estimate
from tightfit.tracing.build import build_dry

RESULTS = Path(__file__).resolve().parents[1] / "results"
CARD = "h200"


def predicted(case: Case) -> float:
    """Seconds of a plain step."""
    model = MODELS[case.model]
    found = estimate(
        build_dry(model.build),
        TokenBatch(case.size, case.length, model.vocabulary),
        optimizer=OPTIMIZERS[case.optimizer],
        precision=case.precision,
        grad_clip=case.grad_clip,
        device=CARD,
    )
    return found.step_seconds


def row_of(measured: dict[str, Any]) -> dict[str, Any]:
    fields = ("model", "size", "length", "precision", "optimizer", "grad_clip")
    seconds = predicted(Case(**{field: measured[field] for field in fields}))
    taken = measured["measured"]["step_seconds"]
    return {"name": measured["name"], "predicted_seconds": seconds, "measured_seconds": taken}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_published_rates.json")
    given = parser.parse_args()
    cases = json.loads((RESULTS / "gpu.json").read_text("utf-8"))["cases"]
    rows = [row_of(row) for row in cases if row["levers"] is None and "measured" in row]
    given.output.write_text(json.dumps({"environment": environment(), "card": CARD, "rows": rows}, indent=1) + "\n")
    found = sorted(row["predicted_seconds"] / row["measured_seconds"] - 1 for row in rows)
    print(f"{len(rows)} steps: {statistics.median(found):+.1%} in the median, {found[0]:+.0%} to {found[-1]:+.0%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
