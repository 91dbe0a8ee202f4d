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
import tempfile
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
    ("gpt-oss-20b", "rtx3080,memory=8GiB", 8, 2048),
    ("mixtral-8x7b", "rtx3080,memory=8GiB", 8, 2048),
    ("llama-3.2-3b", "rtx3080", 10, 2048),
    ("llama-3.2-1b", "rtx3060-12", 12, 2048),
    ("mistral-7b", "rtx3060-12", 12, 2048),
    ("qwen3-30b-a3b", "rtx3060-12", 12, 2048),
    ("gpt-oss-20b", "rtx3060-12", 12, 2048),
    ("mixtral-8x7b", "rtx3060-12", 12, 2048),
    ("llama-3.2-3b", "rtx4080", 16, 2048),
    ("gpt2-xl", "t4", 16, 1024),
    ("gpt-oss-20b", "rtx4080", 16, 2048),
    ("qwen3-30b-a3b", "rtx4080", 16, 2048),
    ("mixtral-8x7b", "rtx4080", 16, 2048),
    ("qwen2.5-7b", "rtx4090", 24, 2048),
    ("llama-3.1-8b", "rtx4090", 24, 2048),
    ("qwen3-30b-a3b", "rtx4090", 24, 2048),
    ("gpt-oss-20b", "rtx4090", 24, 2048),
    ("mixtral-8x7b", "rtx4090", 24, 2048),
    ("qwen3-8b", "l40s", 48, 2048),
    ("llama-3.1-70b", "l40s", 48, 2048),
    ("mixtral-8x7b", "l40s", 48, 2048),
    ("llama-3.1-8b", "h100", 80, 2048),
    ("llama-3.1-70b", "h100", 80, 2048),
    ("llama-3.1-8b", "h200", 141, 2048),
    ("llama-3.1-70b", "h200", 141, 2048),
)
# Adapters on a diffusion model: model, card, the gigabytes it is sold with, pixels of an image, their base
IMAGES = tuple(
    (model, card, gigabytes, 1024, base)
    for model, base in (("flux.1-dev", "nf4"), ("sdxl", "bf16"))
    for card, gigabytes in (("rtx3080,memory=8GiB", 8), ("rtx3060-12", 12), ("rtx4080", 16), ("rtx4090", 24))
)
ADAPTED = ("--adapter", "r=16,alpha=16", "--optimizer", "adamw_fused", "--precision", "bf16")
# A training on rewards (GRPO): model, card, the gigabytes it is sold with
REWARDS = (
    ("qwen2.5-0.5b", "rtx3080,memory=8GiB", 8),
    ("qwen2.5-1.5b", "rtx3060-12", 12),
    ("qwen2.5-3b", "rtx4080", 16),
    ("qwen2.5-7b", "rtx4090", 24),
)
TRIED = 3  # recipes of each whose other phases are predicted
REWARDED = """\
model: {{path: {model}, adapter: {{r: 16}}}}
data: {{source: prompts.jsonl, sequence_length: 1024}}
training:
  objective: grpo
  reward: examples.reward:names_it
  batch_size: 8
  device: cuda
  grpo: {{group_size: 8, max_completion_tokens: 512, beta: 0.04}}
memory: {{budget: "100%", levers: rounding}}
"""
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
    row = {"model": model, "device": device, "gigabytes": gigabytes, "length": length}
    return row | answered(model, device, "--seq-len", str(length))


def asked_of_images(case: tuple[str, str, int, int, str]) -> dict[str, Any]:
    """The answer for a diffusion model, and the processor time that it took."""
    model, device, gigabytes, pixels, base = case
    row = {"model": model, "device": device, "gigabytes": gigabytes, "pixels": pixels}
    return row | answered(model, device, "--image", str(pixels), *ADAPTED, "--base", base)


def asked_of_many(case: tuple[str, str, int, int, int]) -> dict[str, Any]:
    """The answer for many cards, and the processor time that it took."""
    model, device, length, cards, nodes = case
    row = {"model": model, "device": device, "length": length, "cards": cards, "nodes": nodes}
    return row | answered(model, device, "--seq-len", str(length), "--world-size", str(cards), "--nodes", str(nodes))


def asked_of_rewards(case: tuple[str, str, int]) -> dict[str, Any]:
    """The recipes whose update fits, best first, each with the peaks of all phases of its training."""
    from tightfit.cli.asking import policy_phases_of
    from tightfit.cli.question import Question
    from tightfit.cli.recipe_subject import recipe_subject, recipe_text, recipes
    from tightfit.errors import CannotFit

    model, device, gigabytes = case
    before, found = processor_seconds(), []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.yaml"
        config.write_text(REWARDED.format(model=model))
        subject = recipe_subject(Question(config=str(config), device=device, base="nf4", optimizer="adamw_fused"))
        outcomes = recipes(subject, lambda line: None)
        for outcome in outcomes.fitting[:TRIED]:
            config.write_text(recipe_text(subject, outcome))
            row = {"name": outcome.name, "changes": outcome.changes, "levers": list(outcome.levers)}
            try:
                phases = policy_phases_of(Question(config=str(config), device=device), "all")
                row |= {"fits": True, "peak_bytes": phases.peak_bytes, "drawn_at_once": phases.drawn_at_once}
            except CannotFit as error:
                row |= {"fits": False, "needed_bytes": error.least_bytes}
            found.append(row)
    return {
        "model": model,
        "device": device,
        "gigabytes": gigabytes,
        "processor_seconds": processor_seconds() - before,
        "commit": environment()["commit"],
        "fitting": len(outcomes.fitting),
        "tried": len(outcomes),
        "recipes": found,
    }


def processor_seconds() -> float:
    """Of this process and of those that it has waited for."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)


def answered(model: str, device: str, *more: str) -> dict[str, Any]:
    question = ["--model", model, "--device", device, *more, "--json"]
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
    results, many, images = record["results"], record.get("many_cards", []), record.get("images", [])
    rewards = record.get("rewards", [])
    commits = ", ".join(dict.fromkeys(row["commit"][:10] for row in [*results, *images, *rewards, *many]))
    head = PAGE.format(torch=record["environment"]["versions"]["torch"], commit=commits, rows=ROWS)
    return (
        head
        + section_of_streams(results)
        + "".join(map(section, [*results, *images]))
        + "".join(section_of_rewards(*pair) for pair in enumerate(rewards))
        + "".join(map(section_of_many, many))
    )


def section_of_streams(results: list[dict[str, Any]]) -> str:
    """What weights that stream from the host add to the recipes that fit, pair by pair."""
    lines = []
    for row in results:
        fitting = [recipe for recipe in row["recipes"] if recipe["fits"]]
        streamed = [recipe for recipe in fitting if recipe.get("streamed_blocks")]
        if streamed:
            host = min(recipe["host_peak_bytes"] for recipe in streamed)
            fastest = max(recipe["tokens_per_second"] for recipe in streamed)
            lines.append(
                f"| {row['model']} | {row['device'].partition(',')[0]}, {row['gigabytes']} GB "
                f"| {len(fitting) - len(streamed)} | {len(fitting)} | {host / GIB:.1f} GiB | {fastest:,.0f} |\n"
            )
    return (
        "\n## What streamed weights add\n\nRecipes that fit with all weights on the card, and with those whose weights "
        "stream from the host too: three are tried of each pair. The last columns are of those that stream.\n\n"
        "| model | card | weights on the card | and streamed | host, from | tokens/s, up to |\n"
        "|---|---|---|---|---|---|\n"
    ) + "".join(lines)


def section_of_rewards(number: int, row: dict[str, Any]) -> str:
    """One training on rewards. The first one says what is asked."""
    asked = (
        "LoRA of rank 16 beside the reference that it is when it is switched off, 8 completions of 512 tokens to a "
        "prompt of 512. Each recipe's update fits; its other phases are predicted for the configuration that "
        "`tightfit fit CONFIG --output` writes (`tightfit estimate CONFIG --phase all`).\n\n"
    )
    count = f"The update of {row['fitting']} of {row['tried']} recipes fits.\n\n"
    names = ("recipe", "generation", "log-probabilities", "update", "drawn at once", "changes", "levers")
    head = f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n"
    title = f"\n## GRPO of {row['model']} on {row['device'].partition(',')[0]}, {row['gigabytes']} GB\n\n"
    return title + (asked if number == 0 else "") + count + head + "".join(map(line_of_rewards, row["recipes"]))


def line_of_rewards(recipe: dict[str, Any]) -> str:
    if not recipe["fits"]:
        needed = f"needs {recipe['needed_bytes'] / GIB:.1f} GiB"
        return f"| {recipe['name']} | {needed} | | | | {recipe['changes']} | |\n"
    peaks = " | ".join(f"{peak / GIB:.1f} GiB" for peak in recipe["peak_bytes"].values())
    levers = ", ".join(recipe["levers"]) or "none"
    return f"| {recipe['name']} | {peaks} | {recipe['drawn_at_once']} | {recipe['changes']} | {levers} |\n"


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
    what = (
        f"an image of {row['pixels']} pixels a side, of adapters on this base alone"
        if "pixels" in row
        else f"sequences of {row['length']} tokens"
    )
    count = f"{len(fitting)} of {len(recipes)} recipes fit {what}.\n\n"
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
        "" if recipe["tokens_per_second"] is None else f"{recipe['tokens_per_second']:,.0f}",
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
    seen = {(row["model"], row["device"]): row for row in record.get("images", [])}
    for case in IMAGES:
        name = f"{case[0]}/{case[1].partition(',')[0]}"
        if case[:2] in seen or (options.only and name not in options.only):
            continue
        seen[case[:2]] = asked_of_images(case)
        record |= {"environment": environment(), "images": [seen[c[:2]] for c in IMAGES if c[:2] in seen]}
        write(record, options.output, f"{name}: {seen[case[:2]]['processor_seconds']:.0f} s of processor time")
    taught = {(row["model"], row["device"]): row for row in record.get("rewards", [])}
    for each in REWARDS:
        name = f"grpo/{each[0]}/{each[1].partition(',')[0]}"
        if each[:2] in taught or (options.only and name not in options.only):
            continue
        taught[each[:2]] = asked_of_rewards(each)
        record |= {"environment": environment(), "rewards": [taught[c[:2]] for c in REWARDS if c[:2] in taught]}
        write(record, options.output, f"{name}: {taught[each[:2]]['processor_seconds']:.0f} s of processor time")
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
