"""Writes docs/accuracy.md: one section for each results file that is there.

    python benchmarks/accuracy_page.py

A benchmark writes its figures to benchmarks/results/NAME.json; its section here is a function from those figures to
text. What has not been measured has no section, and is said to be missing.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.published.seconds_page import seconds_on_cards

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accuracy.md"

Record = Mapping[str, Any]

HEAD = """\
# Accuracy

Written by `python benchmarks/accuracy_page.py` from `benchmarks/results/`. No figure of a GPU has been measured yet:
`python -m benchmarks.gpu` is the suite that will. Every causal language model class of `transformers`, made tiny, has
a page of its own: [zoo.md](zoo.md).
"""


def where(record: Record) -> str:
    """The machine of a results file, in a line."""
    found = record["environment"]
    threads = found["threads"]
    return (
        f"{found['machine']['cpu']}, {threads} thread{'s' if threads != 1 else ''}, torch "
        f"{found['versions']['torch']}, commit {found['commit'][:7]}{' with changes' if found['dirty'] else ''}."
    )


def rows(header: str, lines: Sequence[str]) -> str:
    """A Markdown table."""
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *lines]) + "\n"


# Peaks


def peaks(record: Record) -> str:
    results = record["results"]
    ran = [r for r in results if "measured" in r]
    errors = sorted(abs(r["predicted"] / r["measured"] - 1) for r in ran)
    return f"""\
## Peaks

{where(record)}

Peaks are bytes of the second step; measured is the CPU allocator's own record
(`benchmarks/accuracy.py`).

{len(ran)} configurations: median error {statistics.median(errors):.6%}, worst {errors[-1]:.6%}.
{sum(r.get("within", True) for r in ran)} of {len(ran)} within their budget, \
{sum(r.get("verified", True) for r in ran)} of {len(ran)} verified.

Gradients of plans with exact levers only are bit-equal to plain or not; with levers exact to rounding the
table gives their relative error against fp64, planned / plain (dropout off), and what is recomputed is bit-equal.

""" + rows(
        "| case | precision | optimizer | levers | budget | predicted | measured | error | gradients |",
        [peak_line(row) for row in results],
    )


def peak_line(row: Record) -> str:
    start = f"| {row['case']} | {row['precision']} | {row['optimizer']} | {row['levers']} | {row['budget']} "
    if "least_bytes" in row:
        return start + f"| cannot fit: the least is {row['least_bytes']:,} | | | |"
    error = row["predicted"] / row["measured"] - 1
    return start + f"| {row['predicted']:,} | {row['measured']:,} | {error:+.5%} | {gradients(row)} |"


def gradients(row: Record) -> str:
    if "verified" not in row:
        return ""
    if not row["recompute_bit_equal"]:
        return "NOT EQUAL"
    if row["planned_error"] is None:
        return "bit-equal"
    return f"{row['planned_error']:.2e} / {row['plain_error']:.2e}" + ("" if row["verified"] else " MORE")


# Step time


def step_time(record: Record) -> str:
    results = record["results"]
    errors = sorted(abs(r["error"]) for r in results)
    disturbed = sum(bool(r["disturbed_by"]) for r in results)
    causes = [f"{disturbed} of {len(results)} rows"] if disturbed else []
    causes += ["the calibration"] if record["device"]["disturbed_by"] else []
    busy = f"The machine was not quiet: other processes disturbed {' and '.join(causes)}."
    quiet = busy if causes else "The machine was quiet."
    return f"""\
## Step time

{where(record)}

Predicted before the steps ran, from a calibration in the same run; measured is the median of
{record["rounds"]} steps (`benchmarks/step_time.py`). {quiet}

{len(results)} configurations: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}.

""" + rows(
        "| case | precision | budget | predicted | median | error | least | others, cores |",
        [step_line(row) for row in results],
    )


def step_line(row: Record) -> str:
    return (
        f"| {row['case']} | {row['precision']} | {row['variant']} | {row['predicted_seconds'] * 1e3:.0f} ms "
        f"| {row['median_seconds'] * 1e3:.0f} ms | {row['error']:+.1%} | {row['least_seconds'] * 1e3:.0f} ms "
        f"| {row['others_cores']:.1f} |"
    )


# Plan time


def plan_time(record: Record) -> str:
    return f"""\
## Time of an estimate and of a plan

{where(record)}

Each in a process of its own, for a card that is not there ({record["device"]}); processor seconds
are what is left of the seconds on a machine without other work; peak RSS is of the whole process
(`benchmarks/plan_time.py`).

""" + rows(
        "| model | batch | question | seconds | processor seconds | peak RSS |",
        [plan_line(row) for row in record["results"]],
    )


def plan_line(row: Record) -> str:
    return (
        f"| {row['case']} | {' x '.join(map(str, row['batch']))} | {row['question']} | {row['answer_seconds']:.2f} "
        f"| {row['answer_processor_seconds']:.2f} | {row['rss_bytes'] / 1e6:.0f} MB |"
    )


SECTIONS: dict[str, Callable[[Record], str]] = {
    "accuracy": peaks,
    "step_time": step_time,
    "published_seconds": seconds_on_cards,
    "plan_time": plan_time,
}


def page(results: Path = RESULTS) -> str:
    """The page, of what was measured."""
    parts, missing = [HEAD], []
    for name, section in SECTIONS.items():
        path = results / f"{name}.json"
        if path.exists():
            parts.append(section(json.loads(path.read_text("utf-8"))))
        else:
            missing.append(f"`benchmarks/{name}.py`")
    if missing:
        parts.append(f"Not measured at this commit: {', '.join(missing)}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
