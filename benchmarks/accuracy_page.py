"""Writes docs/accuracy.md: one section for each results file that is there.

    python benchmarks/accuracy_page.py

A benchmark writes its figures to benchmarks/results/NAME.json; its section here is a function from those figures to
text. What has not been measured has no section, and is said to be missing.
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.gpu import page as gpu_page
from benchmarks.published import images, muon
from benchmarks.published.peft_page import methods
from benchmarks.published.seconds_page import seconds_on_cards, two_clocks
from benchmarks.published.sharded_page import sharded

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accuracy.md"

Record = Mapping[str, Any]


def published_muon() -> str:
    """The part of docs/optimizers.md about figures of others."""
    return muon.section(json.loads(muon.RESULTS.read_text("utf-8")))


HEAD = """\
# Accuracy

Written by `python benchmarks/accuracy_page.py` from `benchmarks/results/`. One real card has run the suite, for a
quarter of an hour: an H200. Other predictions for CUDA are compared with null cards, and with figures that others have
measured and published. [zoo.md](zoo.md) covers every causal language model class of `transformers`, made tiny.
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

Peaks are bytes of the second step. "Measured" is the CPU allocator's own record
(`benchmarks/accuracy.py`).

{len(ran)} configurations: median error {statistics.median(errors):.6%}, worst {errors[-1]:.6%}.
{sum(r.get("within", True) for r in ran)} of {len(ran)} within their budget, \
{sum(r.get("verified", True) for r in ran)} of {len(ran)} verified.

Gradients of plans with exact levers only are bit-equal to the plain gradients or not. For levers exact to rounding the
table gives the relative error of the gradients against fp64, planned / plain (dropout off). Recomputed activations are
bit-equal.

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


# Peaks on graphics cards, measured and published by others

WHOLE_MODELS = "step"  # the mode of rows that are a training step of a whole model
SMALL_ERROR = 0.0001


def published(record: Record) -> str:
    clear = [row for row in record["results"] if row["ambiguous"] is None]
    unclear = [row for row in record["results"] if row["ambiguous"] is not None]
    given = [row for row in clear if not row["kept_aside"]]
    aside = [row for row in clear if row["kept_aside"]]
    models = [row for row in clear if row["mode"] == WHOLE_MODELS]
    torches = record["environment"]["versions"]["torch"]
    unlike = [row for row in clear if abs(row["error"]) > SMALL_ERROR]
    return (
        f"""\
## Peaks on graphics cards, published by others

Predicted with torch {torches} on a machine without a GPU, for the card, by `python -m benchmarks.published.peaks`
(`make published`). The rows are facts in `benchmarks/published/peaks.json`, with their sources.
`benchmarks/results/published.json` has all of them, predicted and published.

{published_line(record)}

| rows | number | median error | worst error | within 1% |
|---|---|---|---|---|
{published_group("all that state what they ran", clear)}
{published_group("of these: whole models' training steps", models)}
{published_group("of these: rows that showed a gap in the predictions", given)}
{published_group("of these: others, kept aside (they corrected two configurations)", aside)}

"""
        + rows(
            "| source | what | card | date | rows | median error | worst error |",
            [series_line(group) for group in published_series(clear).values()],
        )
        + f"""
{len(unlike)} rows differ by more than {SMALL_ERROR:.2%}:

"""
        + rows(
            "| what | configuration | published | predicted | error | cause |",
            [published_row(row, row["cause"]) for row in unlike],
        )
        + f"""
{len(unclear)} rows do not state everything that decides their bytes. They count nowhere above:

"""
        + rows(
            "| what | configuration | published | predicted | error | not said |",
            [published_row(row, row["ambiguous"]) for row in unclear],
        )
    )


def published_kernels(record: Record) -> str:
    results, versions = record["results"], record["environment"]["versions"]
    return f"""\
## Peaks of kernels of others on graphics cards, published by others

Liger-Kernel's own operators with their Triton kernels, run dry with torch {versions["torch"]} and triton
{versions["triton"]} on a machine without a GPU, by `python -m benchmarks.published.kernels`. No kernel was launched.
The versions of the package are those of the measurements. The rows are facts in `benchmarks/published/kernels.json`,
with their source. The same operators in plain PyTorch (`huggingface`) are among the rows of the section above.

{len(results)} rows: median error {statistics.median(published_errors(results)):.4%}, worst \
{published_errors(results)[-1]:.3%}.

""" + rows(
        "| source | what | card | date | rows | median error | worst error |",
        [series_line(group) for group in published_series(results).values()],
    )


def published_line(record: Record) -> str:
    """The comparison in a sentence, as in the guide."""
    clear = [row for row in record["results"] if row["ambiguous"] is None]
    errors = published_errors(clear)
    sources = len({row["source"] for row in clear})
    return (
        f"Predicted for CUDA, compared with {len(clear)} published measurements from {sources} projects: "
        f"median error {statistics.median(errors):.4%}, worst {errors[-1]:.2%}."
    )


def published_errors(results: Sequence[Record]) -> list[float]:
    return sorted(abs(row["error"]) for row in results)


def published_group(name: str, results: Sequence[Record]) -> str:
    errors = published_errors(results)
    within = sum(error <= 0.01 for error in errors)
    return f"| {name} | {len(errors)} | {statistics.median(errors):.4%} | {errors[-1]:.3%} | {within} |"


def published_series(results: Sequence[Record]) -> dict[tuple[str, ...], list[Record]]:
    series: dict[tuple[str, ...], list[Record]] = {}
    for row in results:
        series.setdefault((row["source"], published_what(row), row["card"], row["date"]), []).append(row)
    return series


def published_what(row: Record) -> str:
    if row["mode"] == WHOLE_MODELS:
        return f"{row['configuration']['method']} {row['configuration']['model']}"
    plain = row["provider"] in ("torch", "huggingface")
    return f"{row['work']}, {row['mode']}" + ("" if plain else f" ({row['provider']})")


def series_line(group: Sequence[Record]) -> str:
    row, errors = group[0], published_errors(group)
    return (
        f"| {row['source']} | {published_what(row)} | {row['card']} | {row['date']} | {len(group)} "
        f"| {statistics.median(errors):.4%} | {errors[-1]:.3%} |"
    )


def published_row(row: Record, why: str) -> str:
    configuration = ", ".join(f"{key} {value}" for key, value in row["configuration"].items())
    return (
        f"| {published_what(row)} | {configuration} | {row['published']:,} {row['unit']} | {row['predicted']:,.4f} "
        f"| {row['error']:+.3%} | {why} |"
    )


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

Predictions were made before the steps ran, from a calibration in the same run. Measurements are the median of
{record["rounds"]} steps (`benchmarks/step_time.py`). {quiet}

{len(results)} configurations: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}.
{beside_drift(results)}
""" + rows(
        "| case | precision | budget | predicted | median | error | least | others, cores | drift | beside it |",
        [step_line(row) for row in results],
    )


def beside_drift(results: Sequence[Record]) -> str:
    """What is left of the errors without the drift of the machine's own speed, in a sentence."""
    errors = sorted(abs(row["error_beside_drift"]) for row in results if "error_beside_drift" in row)
    if not errors:
        return ""
    median, worst = f"{statistics.median(errors):.1%}", f"{errors[-1]:.1%}"
    return f"""\
The calibration's own small steps ran again in each round. "Drift" is how much longer they took than right after the
calibration: the machine's own speed. Beside it the median error is {median}, the worst {worst}.
"""


def step_line(row: Record) -> str:
    drift = (f"{row['drift']:.2f}", f"{row['error_beside_drift']:+.1%}") if "drift" in row else ("", "")
    return (
        f"| {row['case']} | {row['precision']} | {row['variant']} | {row['predicted_seconds'] * 1e3:.0f} ms "
        f"| {row['median_seconds'] * 1e3:.0f} ms | {row['error']:+.1%} | {row['least_seconds'] * 1e3:.0f} ms "
        f"| {row['others_cores']:.1f} | {drift[0]} | {drift[1]} |"
    )


# Plan time


def plan_time(record: Record) -> str:
    return f"""\
## Time of an estimate and of a plan

{where(record)}

Each question ran in its own process, for a card that is not present ({record["device"]}). Processor seconds equal the
seconds on a machine without other work. Peak RSS is of the whole process (`benchmarks/plan_time.py`).

""" + rows(
        "| model | batch | question | seconds | processor seconds | peak RSS |",
        [plan_line(row) for row in record["results"]],
    )


def plan_line(row: Record) -> str:
    return (
        f"| {row['case']} | {' x '.join(map(str, row['batch']))} | {row['question']} | {row['answer_seconds']:.2f} "
        f"| {row['answer_processor_seconds']:.2f} | {row['rss_bytes'] / 1e6:.0f} MB |"
    )


# Ranks


OF_A_CASE = (
    "world_size", "parallel", "precision", "reshard", "recompute", "micro_batches", "grad_clip", "shape", "apart",
    "once", "ddp", "budget", "nodes",
)  # fmt: skip


def ranks(record: Record) -> str:
    results = record["results"]
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in results:
        groups.setdefault(tuple(str(row.get(name)) for name in OF_A_CASE), []).append(row)
    worst = max(abs(row["difference"]) for row in results)
    exact = sum(row["difference"] == 0 for row in results)
    outside = max(row["outside_bytes"] for row in results)
    of_each = Counter(row["environment"] for row in results)
    runs = record["environments"]
    measured_where = [f"- {count} ranks: {where({'environment': runs[run]})}" for run, count in of_each.items()]
    return f"""\
## Ranks of DDP, FSDP2, HSDP, tensor and context parallel

{chr(10).join(measured_where)}

Real processes train a decoder of 4 blocks together, and talk by gloo. Each counts its allocations by a library that
is preloaded (`benchmarks/allocations.c`): those of PyTorch's CPU allocator to the byte, in every thread. PyTorch's
profiler records single threads, and gloo frees copies in threads of its own. The prediction plays one rank at a time,
on a process group that sends nothing. Of {len(results)} ranks, {exact} have the predicted peak to the byte. A
difference of 4 bytes is the sum of the losses of several micro-batches, which a dry run does not keep. The largest is
{worst} bytes.

Gloo's copies are in the prediction, by a rule that was measured: a gather holds a copy of its result, a reduce-scatter
a copy of its input. "Without gloo" leaves them out, as on a card. Gloo also has buffers that no allocator counts, of at
most 2 MB; all large allocations outside of PyTorch's allocator together rose by up to {outside / 1e6:.1f} MB. Single
steps are up to one copy higher, where gloo's thread frees it late: "highest" of the measured steps.

""" + rows(
        "| ranks | engine | precision | step | width | predicted | without gloo | measured | highest | difference |",
        [ranks_line(group) for group in groups.values()],
    )


def ranks_line(group: Sequence[Record]) -> str:
    first = group[0]
    step = [
        *(["recompute"] if first["recompute"] else []),
        *(["weights kept after forward"] if first["reshard"] is False else []),
        *([f"{first['micro_batches']} micro-batches"] if first["micro_batches"] > 1 else []),
        *(["clipping"] if first["grad_clip"] else []),
        *(["embedding and head apart"] if first.get("apart") else []),
        *(["gradients exchanged once"] if first.get("once") else []),
        *(f"{name}={value}" for name, value in first.get("ddp", ())),
        *([f"a plan for {first['budget']}"] if first.get("budget") else []),
    ]

    def each(name: str) -> str:
        return ", ".join(f"{size:,}" for size in sorted({row[name] for row in group if name in row}, reverse=True))

    return (
        f"| {first['world_size']} | {first['parallel']} | {first['precision']} | {', '.join(step) or 'plain'} "
        f"| {first['shape'][0]} | {each('predicted_bytes')} | {each('without_gloo_bytes')} | {each('measured_bytes')} "
        f"| {max(row['highest_bytes'] for row in group):,} | {each('difference')} |"
    )


# Cards


def on_null_cards(record: Record) -> str:
    """Steps on null cards, card by card, and those that were not predicted to the byte."""
    ran = [row for row in record["steps"] if "measured" in row]
    failed = [row for row in record["steps"] if "error" in row]
    cards = dict.fromkeys(row["card"] for row in ran)
    missed = sorted((row for row in ran if row["predicted"] != row["measured"]), key=lambda row: -abs(_off(row)))
    errors = Counter(_why(row["error"]) for row in failed)
    commits = Counter(row["commit"] for row in ran)
    over = [row for row in ran if row["measured"] > row.get("budget", row["measured"])]
    table = rows(
        "| card | steps | to the byte | worst | reserved: to the byte | worst | plans | above their budget |",
        [_card_line(card, [row for row in ran if row["card"] == card]) for card in cards],
    )
    misses = "Not to the byte, all of them:\n\n" + rows(
        "| step | predicted | measured | difference | commit |",
        [f"| {r['name']} | {r['predicted']:,} | {r['measured']:,} | {_off(r):+.4%} | {r['commit']} |" for r in missed],
    )
    why = "; ".join(f"{error} ({count})" for error, count in errors.most_common())
    return f"""\
## On null cards

Measured with PyTorch's own CUDA allocator on a runtime that computes nothing (`devices.nullcard`): the allocator, the
operators' host code, autocast and the optimizers are PyTorch's. It does not show what kernels compute, seconds, the
driver's own memory, or the memory in which cuDNN computes. On an H100 attention is cuDNN's, and takes on a null card
what it was seen to take on a real H200.

{card_line(record)} {len(over)} of {sum("budget" in row for row in ran)} plans are above their budget. Each step runs in
a process of its own (`python -m benchmarks.card`); the third step is compared. Commits:
{", ".join(f"{commit} ({count} steps)" for commit, count in commits.most_common())}.

{table}
{misses if missed else ""}
{len(failed)} steps were not measured{": " if failed else ""}{why}.
"""


def card_line(record: Record) -> str:
    """The count of steps on null cards, in a sentence."""
    ran = [row for row in record["steps"] if "measured" in row]
    exact = sum(row["predicted"] == row["measured"] for row in ran)
    worst = max(abs(_off(row)) for row in ran)
    cards = len({row["card"] for row in ran})
    return f"Of {len(ran)} steps on {cards} cards, {exact} are predicted to the byte; worst {worst:.4%}."


def _why(error: str) -> str:
    return error.split(":")[0] if error.startswith("no answer") else error.split(". ")[0].split(" (")[0]


def _card_line(card: str, steps: Sequence[Record]) -> str:
    exact = sum(row["predicted"] == row["measured"] for row in steps)
    reserved = [row["predicted_reserved"] / row["reserved"] - 1 for row in steps]
    plans = [row for row in steps if "budget" in row]
    return (
        f"| {card} | {len(steps)} | {exact} | {max(abs(_off(row)) for row in steps):.4%} | {reserved.count(0.0)} "
        f"| {max(map(abs, reserved)):.2%} | {len(plans)} | {sum(row['measured'] > row['budget'] for row in plans)} |"
    )


def _off(row: Record) -> float:
    return row["predicted"] / row["measured"] - 1


SECTIONS: dict[str, Callable[[Record], str]] = {
    "accuracy": peaks,
    "gpu": gpu_page.on_a_card,
    "published": published,
    "published_kernels": published_kernels,
    "published_sharded": sharded,
    "published_peft": methods,
    "published_images": images.section,
    "card": on_null_cards,
    "gpu_null_cards": gpu_page.on_null_cards,
    "step_time": step_time,
    "published_seconds": seconds_on_cards,
    "published_clocks": two_clocks,
    "plan_time": plan_time,
    "ranks": ranks,
}

# Where the file of results has another name
SCRIPTS = {
    "gpu": "gpu",
    "gpu_null_cards": "gpu",
    "published": "published/peaks.py",
    "published_kernels": "published/kernels.py",
    "published_peft": "published/peft.py",
    "published_images": "published/images.py",
    "published_sharded": "published/sharded.py",
    "published_seconds": "published/seconds.py",
    "published_clocks": "published/clocks.py",
}


def page(results: Path = RESULTS) -> str:
    """The page, of what was measured."""
    parts, missing = [HEAD], []
    for name, section in SECTIONS.items():
        path = results / f"{name}.json"
        if path.exists():
            parts.append(section(json.loads(path.read_text("utf-8"))))
        else:
            missing.append(f"`benchmarks/{SCRIPTS.get(name, name + '.py')}`")
    if missing:
        parts.append(f"Not measured at this commit: {', '.join(missing)}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
