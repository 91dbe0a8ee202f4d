"""What fits: the recipes of models on the card that people have for each, and of two on many cards, as
docs/what_fits.md.

    python benchmarks/what_fits.py [--output FILE] [--table FILE] [--only PAIR ...]

Each pair is one `tightfit fit` in a process of its own, with sequences of 2048 tokens (1024 for GPT-2) and one sequence
a step. Results are written after each pair, and a pair that the output file already holds is not run again.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import ROOT, environment

GIB = 2**30
# model, card, the gigabytes it is sold with, tokens of a sequence
PAIRS = (
    ("qwen2.5-0.5b", "rtx2060", 6, 2048),
    ("llama-3.2-1b", "rtx2060", 6, 2048),
    ("qwen2.5-0.5b", "rtx3080,memory=8GiB", 8, 2048),
    ("llama-2-7b", "rtx3080,memory=8GiB", 8, 2048),
    ("llama-3.1-8b", "rtx3080,memory=8GiB", 8, 2048),
    ("qwen3-14b", "rtx3080,memory=8GiB", 8, 2048),
    ("qwen3-30b-a3b", "rtx3080,memory=8GiB", 8, 2048),
    ("llama-3.2-3b", "rtx3080", 10, 2048),
    ("llama-3.2-1b", "rtx3060-12", 12, 2048),
    ("mistral-7b", "rtx3060-12", 12, 2048),
    ("qwen3-30b-a3b", "rtx3060-12", 12, 2048),
    ("llama-3.2-3b", "rtx4080", 16, 2048),
    ("gpt2-xl", "t4", 16, 1024),
    ("gpt-oss-20b", "rtx4080", 16, 2048),
    ("qwen3-30b-a3b", "rtx4080", 16, 2048),
    ("qwen2.5-7b", "rtx4090", 24, 2048),
    ("llama-3.1-8b", "rtx4090", 24, 2048),
    ("qwen3-30b-a3b", "rtx4090", 24, 2048),
    ("qwen3-8b", "l40s", 48, 2048),
    ("llama-3.1-70b", "l40s", 48, 2048),
    ("mixtral-8x7b", "l40s", 48, 2048),
    ("llama-3.1-8b", "h100", 80, 2048),
    ("llama-3.1-70b", "h100", 80, 2048),
    ("llama-3.1-8b", "h200", 141, 2048),
    ("llama-3.1-70b", "h200", 141, 2048),
)
# model, card, tokens of a rank's sequence, cards, nodes
MANY_CARDS = (
    ("llama-3.1-8b", "rtx4090", 2048, 2, 1),
    ("llama-3.1-8b", "h100", 8192, 8, 1),
    ("llama-3.1-8b", "h100", 8192, 64, 8),
    ("llama-3.1-70b", "h100", 8192, 8, 1),
    ("llama-3.1-70b", "h100", 8192, 64, 8),
)
ROWS = 8  # of a table on the page
PAGE = """\
# What fits

Written by `python benchmarks/what_fits.py`; the figures are in `benchmarks/results/what_fits.json`, made with torch
{torch} at commits {commit}. Nothing was computed: each table is one `tightfit fit`, best first, for one sequence a step
in all of the card's memory.

The first {rows} recipes of each pair are shown. Peaks are predicted allocated bytes; the allocator's segments and the
context fit beside them. `~` marks a size that was read off a line through a few dry runs; the others were run
dry. Seconds follow the card's published rates ([accuracy.md](accuracy.md) has their error). Adapters are of rank 16 on
the layers that `peft` chooses for the architecture.
"""


def asked(pair: tuple[str, str, int, int]) -> dict[str, Any]:
    """The answer for one pair, and the processor time that it took."""
    model, device, gigabytes, length = pair
    return {"model": model, "device": device, "gigabytes": gigabytes, "length": length} | answered(
        model, device, length
    )


def asked_of_many(case: tuple[str, str, int, int, int]) -> dict[str, Any]:
    """The answer for many cards, and the processor time that it took."""
    model, device, length, cards, nodes = case
    row = {"model": model, "device": device, "length": length, "cards": cards, "nodes": nodes}
    return row | answered(model, device, length, "--world-size", str(cards), "--nodes", str(nodes))


def answered(model: str, device: str, length: int, *more: str) -> dict[str, Any]:
    question = ["--model", model, "--device", device, "--seq-len", str(length), *more, "--json"]
    command = [sys.executable, "-m", "tightfit", "fit", *question]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return {
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "commit": environment()["commit"],
        "recipes": json.loads(done.stdout)["recipes"],
    }


def page(record: dict[str, Any]) -> str:
    """docs/what_fits.md."""
    results, many = record["results"], record.get("many_cards", [])
    commits = " and ".join(dict.fromkeys(row["commit"][:10] for row in [*results, *many]))
    head = PAGE.format(torch=record["environment"]["versions"]["torch"], commit=commits, rows=ROWS)
    return head + "".join(map(section, results)) + "".join(map(section_of_many, many))


def section_of_many(row: dict[str, Any]) -> str:
    """One model on many cards, with the rows of other numbers of cards."""
    fitting = [recipe for recipe in row["recipes"] if recipe["fits"]]
    nodes = f" in {row['nodes']} nodes" if row["nodes"] > 1 else ""
    return (
        f"\n## {row['model']} on {row['cards']} {row['device']}{nodes}\n\n"
        f"{len(fitting)} of {len(row['recipes'])} recipes fit one sequence of {row['length']} tokens a card, "
        f"in {row['processor_seconds']:.0f} s of processor time. Peaks are those of the largest rank.\n\n"
        "| recipe | peak | longest sequence | largest batch | step | tokens/s of all cards | changes | levers |\n"
        "|---|---|---|---|---|---|---|---|\n"
    ) + "".join(map(line_of_many, (fitting or row["recipes"])[:ROWS]))


def line_of_many(recipe: dict[str, Any]) -> str:
    if not recipe["fits"]:
        return f"| {recipe['name']} | needs {recipe['needed_bytes'] / GIB:.1f} GiB | | | | | {recipe['changes']} | |\n"
    levers = ", ".join(recipe["levers"]) or "none"
    longest, largest = sizes(recipe)
    return (
        f"| {recipe['name']} | {recipe['peak_bytes'] / GIB:.1f} GiB | {longest} | {largest} "
        f"| {recipe['step_seconds']:.2f} s | {recipe['tokens_per_second']:,.0f} | {recipe['changes']} | {levers} |\n"
    )


def section(row: dict[str, Any]) -> str:
    """One pair."""
    recipes = row["recipes"]
    fitting = [recipe for recipe in recipes if recipe["fits"]]
    shown = (fitting or recipes)[:ROWS]
    title = f"\n## {row['model']} on {row['device'].partition(',')[0]}, {row['gigabytes']} GB\n\n"
    count = f"{len(fitting)} of {len(recipes)} recipes fit sequences of {row['length']} tokens.\n\n"
    # Answers of earlier commits did not say the host's memory.
    host = any(recipe.get("host_peak_bytes") is not None for recipe in shown)
    names = ("recipe", "peak", *(("host", "blocks streamed") if host else ()), "longest sequence", "largest batch",
             "step", "tokens/s", "changes", "levers")  # fmt: skip
    head = f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n"
    return title + count + head + "".join(line(recipe, host) for recipe in shown)


def line(recipe: dict[str, Any], host: bool) -> str:
    """One recipe; with the `host`'s memory and the blocks whose weights are there."""
    if not recipe["fits"]:
        needed = f"needs {recipe['needed_bytes'] / GIB:.1f} GiB{' | |' if host else ''}"
        return f"| {recipe['name']} | {needed} | | | | | {recipe['changes']} | |\n"
    there = recipe.get("host_peak_bytes")
    on_host = ["" if there is None else f"{there / GIB:.1f} GiB", str(recipe.get("streamed_blocks") or "")]
    cells = (
        recipe["name"],
        f"{recipe['peak_bytes'] / GIB:.1f} GiB",
        *(on_host if host else ()),
        *sizes(recipe),
        f"{recipe['step_seconds']:.2f} s",
        f"{recipe['tokens_per_second']:,.0f}",
        recipe["changes"],
        ", ".join(recipe["levers"]) or "none",
    )
    return f"| {' | '.join(cells)} |\n"


def sizes(recipe: dict[str, Any]) -> list[str]:
    """The longest sequence and the largest batch, where they were looked for."""
    mark = "" if recipe["confirmed"] else "~"
    return ["" if recipe[key] is None else f"{mark}{recipe[key]:,}" for key in ("longest_sequence", "largest_batch")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="PAIR", help="such as llama-3.1-8b/rtx4090 or llama-3.1-8b/8xh100; default: all"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "what_fits.json")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "what_fits.md")
    options = parser.parse_args()
    record: dict[str, Any] = {"results": []}
    if options.output.exists():
        record = json.loads(options.output.read_text("utf-8"))
    known = {(row["model"], row["device"]): row for row in record["results"]}
    for pair in PAIRS:
        name = f"{pair[0]}/{pair[1].partition(',')[0]}"
        if pair[:2] in known or (options.only and name not in options.only):
            continue
        known[pair[:2]] = asked(pair)
        record |= {
            "environment": environment(),
            "results": [known[other[:2]] for other in PAIRS if other[:2] in known],
        }
        write(record, options.output, f"{name}: {known[pair[:2]]['processor_seconds']:.0f} s of processor time")
    many = {(row["model"], row["device"], row["cards"]): row for row in record.get("many_cards", [])}
    for case in MANY_CARDS:
        key = (*case[:2], case[3])
        name = f"{case[0]}/{case[3]}x{case[1]}"
        if key in many or (options.only and name not in options.only):
            continue
        many[key] = asked_of_many(case)
        cases = [(*other[:2], other[3]) for other in MANY_CARDS]
        record |= {"environment": environment(), "many_cards": [many[other] for other in cases if other in many]}
        write(record, options.output, f"{name}: {many[key]['processor_seconds']:.0f} s of processor time")
    if "environment" in record:
        options.table.write_text(page(record), "utf-8")


def write(record: dict[str, Any], output: Path, line: str) -> None:
    output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(line, flush=True)


if __name__ == "__main__":
    main()
