"""Predicts and measures training steps on the GPU that is present.

    python -m benchmarks.gpu --output benchmarks/results/gpu.json
    python -m benchmarks.gpu --small --output /tmp/small.json        (a few small cases, on the CPU)

Each case has a process of its own. `--together` of them predict at a time; then they run their steps one after the
other, so that each has the card to itself. A case's prediction is in the file before the case runs. A case that fails
is recorded with its error, and the next one runs. Beyond `--minutes` no further case is begun.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.gpu.cases import Case, all_cases, small_cases
from benchmarks.gpu.measuring import describe_device, run

from tightfit.devices.present import lookup

PROCESS: Any = multiprocessing.get_context("spawn").Process


class Results:
    """Mutable: the file of results, written anew after every change."""

    def __init__(self, path: Path, device: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {"environment": environment(), "device": device, "cases": [], "summary": {}}

    def add(self, case: Case) -> dict[str, Any]:
        row = {"name": case.name, **asdict(case)}
        self.content["cases"].append(row)
        return row

    def write(self) -> None:
        self.content["summary"] = summary(self.content["cases"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


class Running:
    """A case in a process of its own."""

    def __init__(self, case: Case, device: str, results: Results):
        self.row, self._results = results.add(case), results
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = PROCESS(target=run, args=(case, device, theirs))
        self._process.start()
        theirs.close()  # here: what the process does not say before it ends is the end of the pipe

    def predicted(self) -> None:
        self._hear()

    def measured(self) -> None:
        if "error" not in self.row:
            self._pipe.send("now")
            self._hear()
        self._process.join()

    def _hear(self) -> None:
        try:
            self.row |= self._pipe.recv()
        except EOFError:
            self._process.join()
            self.row["error"] = f"the process ended with exit code {self._process.exitcode}"
        self._results.write()


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst error of each figure, and how many cases there are of each outcome."""
    ran = [row for row in rows if "measured" in row]
    errors = {figure: sorted(_errors(ran, figure)) for figure in ("peak_bytes", "reserved_bytes", "step_seconds")}
    budgets = [(row["measured"]["peak_bytes"], row["predicted"].get("budget_bytes")) for row in ran]
    return {
        "cases": len(rows),
        "measured": len(ran),
        "failed": sum("error" in row for row in rows),
        "within_budget": sum(peak <= budget for peak, budget in budgets if budget is not None),
        "planned": sum(budget is not None for _, budget in budgets),
        "errors": {f: {"median": median(e), "worst": e[-1]} for f, e in errors.items() if e},
        "planned_against_plain": list(_against_plain(ran)),
    }


def _errors(rows: Sequence[dict[str, Any]], figure: str) -> Iterator[float]:
    for row in rows:
        predicted, measured = row["predicted"][figure], row["measured"][figure]
        if predicted is not None and measured is not None:
            yield abs(predicted / measured - 1)


def _against_plain(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Measured peak and time of each planned case as shares of its plain one's."""
    same = ("model", "size", "length", "precision", "optimizer", "grad_clip")
    plain = {tuple(row[key] for key in same): row["measured"] for row in rows if row["levers"] is None}
    for row in rows:
        base = plain.get(tuple(row[key] for key in same))
        if row["levers"] is not None and base is not None:
            shares = {f: row["measured"][f] / base[f] for f in ("peak_bytes", "step_seconds")}
            yield {"name": row["name"], **shares}


def line(row: dict[str, Any]) -> str:
    """What a case came to, for the terminal."""
    if "measured" not in row:
        return f"{row['name']}: FAILED {row['error'].splitlines()[0]}"
    predicted, measured = row["predicted"], row["measured"]
    words = [f"peak {measured['peak_bytes']:,} ({predicted['peak_bytes'] / measured['peak_bytes'] - 1:+.3%})"]
    if measured["reserved_bytes"] and predicted["reserved_bytes"]:
        share = predicted["reserved_bytes"] / measured["reserved_bytes"] - 1
        words.append(f"reserved {measured['reserved_bytes']:,} ({share:+.2%})")
    words.append(
        f"{measured['step_seconds'] * 1e3:.1f} ms ({predicted['step_seconds'] / measured['step_seconds'] - 1:+.1%})"
    )
    return f"{row['name']}: {', '.join(words)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a few small cases, on the CPU")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name holds one of these texts")
    parser.add_argument("--minutes", type=float, default=8.5, help="default: 8.5")
    parser.add_argument("--together", type=int, default=1, help="cases that are predicted at a time (default: 1)")
    parser.add_argument("--pause", action="store_true", help="measure when a line comes from the standard input")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --small runs a few cases on the CPU")
    device = "cpu" if options.small else "cuda"
    everything = small_cases() if options.small else all_cases()
    cases = [case for case in everything if any(text in case.name for text in options.only)]
    began = time.monotonic()
    results = Results(options.output, describe_device(lookup(device, print, measured=True)))
    for first in range(0, len(cases), options.together):
        if time.monotonic() - began > 60 * options.minutes:
            results.content["not_begun"] = [case.name for case in cases[first:]]
            results.write()
            break
        running = [Running(case, device, results) for case in cases[first : first + options.together]]
        for each in running:
            each.predicted()
        if options.pause:
            print("prepared", flush=True)
            sys.stdin.readline()
        for number, each in enumerate(running, first + 1):
            each.measured()
            print(f"{number}/{len(cases)} {line(each.row)}", flush=True)
    print(json.dumps(results.content["summary"]["errors"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
