"""Is a step the sum of the longer time of each operator, or the later of two clocks?

    python -m benchmarks.published.clocks --remember FILE [--rounds 0] [--output FILE]

Predicts the published steps in both ways: with the constants that tightfit has, which were fitted to the first way,
and, with --rounds, with constants fitted anew for each way, by the same search on the same half of the rows. The other
half judges. Writes benchmarks/results/published_clocks.json, of which docs/accuracy.md has a table.
"""

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.published import halves
from benchmarks.published.fit_seconds import KINDS, NAMES, Fit, Parameters, kernels, remembered_work
from benchmarks.published.predicted_seconds import clock_seconds, predicted, roofline_of
from benchmarks.published.seconds import summary

from tightfit.devices.work import Work

OUTPUT = Path(__file__).parents[1] / "results" / "published_clocks.json"
WAYS = {"sum of operators": False, "two clocks": True}


def judged(work: dict[str, Counter[Work]], two_clocks: bool, parameters: Parameters | None) -> dict[str, Any]:
    """The errors of the steps that no fit has seen, and of those that it has."""
    rows, host_later = [], 0
    for row in halves.rows():
        roofline = roofline_of(row)
        if parameters is not None:
            roofline = replace(roofline, kernels=kernels(parameters, KINDS[row["card"]]))
        seconds = predicted(row, work[row["id"]], roofline, two_clocks=two_clocks)
        is_fitted = halves.is_for_fitting(row)
        if row["kind"] == "step" and not is_fitted:
            host, device = clock_seconds(row, work[row["id"]], roofline)
            host_later += host > device
        rows.append({**row, "predicted": seconds, "fitted": is_fitted})
    steps = [row for row in rows if row["kind"] == "step"]
    return {
        "judged steps": summary([row for row in steps if not row["fitted"]]),
        "steps seen": summary([row for row in steps if row["fitted"]]),
        "judged rows": summary([row for row in rows if not row["fitted"]]),
        "judged steps whose host is later": host_later,
        "mean ratio of judged steps": sum(r["predicted"] / r["seconds"] for r in steps if not r["fitted"])
        / sum(not r["fitted"] for r in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--remember", type=Path, help="a file to keep the dry runs in")
    parser.add_argument("--rounds", type=int, default=0, help="of the search for constants of each way")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    where, work = environment(), remembered_work(halves.rows(), given.remember)
    seen = [row for row in halves.rows() if halves.is_for_fitting(row)]
    found: dict[str, Any] = {"as fitted for the sum of operators": {}, "fitted anew": {}}
    for name, two_clocks in WAYS.items():
        found["as fitted for the sum of operators"][name] = judged(work, two_clocks, None)
        print(name, json.dumps(found["as fitted for the sum of operators"][name]), flush=True)
    for name, two_clocks in WAYS.items() if given.rounds else ():
        parameters = Fit(seen, work, two_clocks=two_clocks).search(given.rounds)
        launch = {kind: parameters[f"{kind}:launch_seconds"] for kind in NAMES}
        found["fitted anew"][name] = {**judged(work, two_clocks, parameters), "launch_seconds": launch}
        print(name, json.dumps(found["fitted anew"][name]), flush=True)
    record = {"environment": where, "rounds": given.rounds, **found}
    given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
