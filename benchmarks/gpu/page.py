"""The sections of the pages about a real card."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
Record = Mapping[str, Any]
MIB = 2**20
OWN = ("MM26", "MM104", "1B", "8B-width")  # models that are not of transformers
NEAR = 0.9  # of a peak: a plan below that was made for another budget


def of_the_null_card(results: Path = RESULTS) -> dict[str, Record]:
    """What a null card measured of the same steps, by their names."""
    path = results / "gpu_null_card.json"
    rows = json.loads(path.read_text("utf-8"))["cases"] if path.exists() else []
    return {row["name"]: row["measured"] for row in rows if "measured" in row}


def beside_the_null_card(record: Record) -> str:
    """How many plain steps took the same bytes on a null card, in sentences."""
    played = of_the_null_card()
    both = [(row, row["measured"], played[row["name"]]) for row in record["cases"] if row["name"] in played]
    own, others = ([pair for pair in both if pair[0]["model"].startswith(OWN) == is_own] for is_own in (True, False))
    exact, same_reserved, exact_others = (
        sum(ours[figure] == theirs[figure] for _, ours, theirs in pairs)
        for pairs, figure in ((own, "peak_bytes"), (own, "reserved_bytes"), (others, "peak_bytes"))
    )
    apart = max(abs(ours["peak_bytes"] - theirs["peak_bytes"]) for _, ours, theirs in own)
    return (
        f"Of {len(own)} plain steps of our own decoder, {exact} allocated the same bytes, to the byte, on a null card\n"
        f"of this name with the same wheel ({apart:,} bytes between others), and {same_reserved} reserved the same.\n"
        f"Of {len(others)} steps of models of transformers, whose release on the card was not recorded,\n"
        f"{exact_others} allocated the same."
    )


def predicted_since(record: Record, results: Path = RESULTS) -> str:
    """How many plain steps of the card are predicted to the byte by now, in a sentence."""
    now = json.loads((results / "gpu_null_card.json").read_text("utf-8"))
    measured = {row["name"]: row["measured"] for row in record["cases"] if row["levers"] is None}
    both = [(row["predicted"], measured[row["name"]]) for row in now["cases"] if row["name"] in measured]
    exact, reserved = (
        sum(predicted[figure] == mine[figure] for predicted, mine in both)
        for figure in ("peak_bytes", "reserved_bytes")
    )
    worst = max(abs(predicted["peak_bytes"] / mine["peak_bytes"] - 1) for predicted, mine in both)
    return (
        f"Predicted anew at commit {now['environment']['commit'][:7]}:\n{exact} of {len(both)} plain steps are the "
        f"card's allocated bytes, {reserved} the reserved ones; worst {worst:.3%}."
    )


def errors(record: Record, figure: str) -> list[float]:
    """Shares by which predictions are off, the least first."""
    found = ((row["predicted"][figure], row["measured"][figure]) for row in record["cases"])
    return sorted(abs(predicted / measured - 1) for predicted, measured in found if predicted and measured)


def plans_above(record: Record) -> tuple[int, int, float]:
    """How many plans took more than their budget, of how many, and the largest share above."""
    plans = [row for row in record["cases"] if "budget_bytes" in row["predicted"]]
    shares = [row["measured"]["peak_bytes"] / row["predicted"]["budget_bytes"] - 1 for row in plans]
    return sum(share > 0 for share in shares), len(plans), max(0.0, *shares)


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def rates_of_products() -> tuple[float, float]:
    """TFLOP/s of bf16 products: the highest that the calibration's fit implied, and that of the two largest steps."""
    fits = results("gpu_calibration")["device"]["products"]
    implied = max(2 / whole / 1e12 for name, (whole, *_) in fits.items() if name.endswith("bfloat16"))
    large = [step for step in results("gpu_times")["steps"] if step["case"].startswith(("1B, 4", "8B"))]
    seconds = [next(spent for name, _, spent in step["ops"] if name == "aten::mm") / 1e6 for step in large]
    return implied, statistics.median(
        6 * step["linear_weights"] * step["tokens"] / spent / 1e12 for step, spent in zip(large, seconds, strict=True)
    )


def kernels_apart() -> str:
    """What the seconds of these steps lacked, in sentences."""
    found = results("gpu_kernels")
    rows = next(reversed(found["elementwise"].values()))
    odd, even = found["head"].values()
    times = {name: odd[name] / even[name] for name in odd}
    return (
        f"{found['environment']['machine']['gpu']}'s kernels beside each other (`python -m benchmarks.gpu.kernels`)\n"
        f"show why the others are too short: the products of a loss head take {min(times.values()):.1f} to "
        f"{max(times.values()):.1f} times as long with GPT-2's odd\nvocabulary as with the next multiple of eight, a "
        f"cast to fp32 {rows['widening'] / rows['narrowing']:.1f} times one to bf16, and a product of "
        f"unlike tensors\n{rows['uneven product, bfloat16'] / rows['even product, bfloat16']:.1f} times one of "
        "like ones. The calibration of a card times these apart since; the seconds below are of before."
    )


def by_published_rates() -> str:
    """How far the same steps are off where the card is not there, in a sentence."""
    record = results("gpu_published_rates")
    found = sorted(row["predicted_seconds"] / row["measured_seconds"] - 1 for row in record["rows"])
    return (
        f"By published rates alone, which is what `--device {record['card']}` says on other\n"
        f"machines (`python -m benchmarks.gpu.published_rates`), the {len(found)} plain steps are "
        f"{statistics.median(found):+.0%} off in the median,\nfrom {found[0]:+.0%} to {found[-1]:+.0%}."
    )


def on_a_card(record: Record) -> str:
    """The section of docs/accuracy.md."""
    machine, versions = record["environment"]["machine"], record["environment"]["versions"]
    peaks, reserved, seconds = (errors(record, f) for f in ("peak_bytes", "reserved_bytes", "step_seconds"))
    above, plans, share = plans_above(record)
    implied, reached = rates_of_products()
    tests = results("gpu_tests")["results"]
    exact, captured = (next(tests[name] for name in tests if part in name) for part in ("exact", "captured"))
    operators = results("gpu_operators")["results"]
    kinds = {
        kind: (sum(d["compared"] for d in dtypes.values()), sum(len(d["differ"]) for d in dtypes.values()))
        for kind, dtypes in operators.items()
    }
    calls = ", ".join(f"{kind.replace('_', ' ')} {count - off:,} of {count:,}" for kind, (count, off) in kinds.items())
    lines = "\n".join(_line(row) for row in record["cases"])
    last = [row for row in record["cases"] if row["commit"] == record["environment"]["commit"]]
    now = {"cases": last}
    own, spent = errors(now, "peak_bytes"), errors(now, "step_seconds")
    fresh = (
        f"The {len(last)} steps of the last commit alone: allocated {statistics.median(own):.3%} in the\n"
        f"median and {own[-1]:.3%} at worst, seconds {statistics.median(spent):.1%} and {spent[-1]:.0%}."
    )
    return f"""\
## On a real card

{machine["gpu"]}, torch {versions["torch"]}, {machine["cores"]} cores of {machine["cpu"]}; commits
{", ".join(dict.fromkeys(row["commit"][:7] for row in record["cases"]))}. Each step ran in a process of its own, after
its prediction was written down (`python -m benchmarks.gpu`); the third step is compared. Of {len(peaks)} steps:

| figure | median error | worst |
|---|---|---|
| allocated bytes | {statistics.median(peaks):.3%} | {peaks[-1]:.2%} |
| reserved bytes | {statistics.median(reserved):.2%} | {reserved[-1]:.1%} |
| seconds | {statistics.median(seconds):.1%} | {seconds[-1]:.0%} |

{above} of {plans} plans took more than its budget{f", by {share:.2%}" if above else ""}. {fresh}
The plan above its budget is of a decoder that was built on the card, where the computation of its rotary table left a
hole between its weights. The table is computed on the host since, and that step is to the byte on a null card
(`tests/card/test_plan_bytes.py`).

**The null card against it.** {beside_the_null_card(record)}
So what is left of the errors in bytes is not the card's. Its causes were found on the null card: what building a model
leaves in the allocator's cache decides which blocks later steps split (a plan gives that back when it is applied), and
which of equal blocks is taken. {predicted_since(record)}

**Operators against their rules** (`make test-real-card`): {calls}. Those that differ are cuDNN's: what its engine takes
for attention (512 bytes, since then in the rule), what its convolutions take (not public, not counted), and the
statistics of group norm in 2.11 (since then in the rule).

**Exactness**: {exact["passed"]:,} tests of recompute, captured blocks and their traps are bit-equal on this card
(`tests/card/test_exact_on_card.py`, `test_recompute_by_hand.py`, all cases, with deterministic algorithms;
{exact["skipped"]} are of the null card itself), and {captured["passed"]} tests of the bytes of captured blocks pass.

Since the first of these commits, products are bounded by the fastest that was seen: a fit alone implied more than twice
the {reached:.0f} TFLOP/s that the steps of the 1B and of the 8B width reach in bf16 (now {implied:,.0f}). Steps whose
launches take longer than their kernels (small batches) are predicted too short: a host launches faster in a loop than
in a step. {kernels_apart()}

{by_published_rates()}

| step | predicted | measured | error | reserved | error | seconds predicted | measured |
|---|---|---|---|---|---|---|---|
{lines}
"""


def _line(row: Record) -> str:
    predicted, measured = row["predicted"], row["measured"]
    shares = {f: predicted[f] / measured[f] - 1 for f in ("peak_bytes", "reserved_bytes")}
    return (
        f"| {row['name']} | {predicted['peak_bytes']:,} | {measured['peak_bytes']:,} | {shares['peak_bytes']:+.3%} "
        f"| {measured['reserved_bytes']:,} | {shares['reserved_bytes']:+.2%} "
        f"| {predicted['step_seconds'] * 1e3:.1f} ms | {measured['step_seconds'] * 1e3:.1f} ms |"
    )


def equal_memory_on_a_card(record: Record) -> str:
    """The section of docs/benchmarks.md."""
    where = record["environment"]
    commits = ", ".join(dict.fromkeys(each["commit"][:7] for each in record["results"]))
    plans = [row for each in record["results"] for row in each["ways"].values() if "budget_bytes" in row]
    over = [row["peak_bytes"] / row["budget_bytes"] - 1 for row in plans]
    above, share = sum(each > 0 for each in over), max(over)
    parts = [
        f"""\
## Time against peak, on a card

{where["machine"]["gpu"]}, torch {where["versions"]["torch"]}, bf16 autocast, AdamW, commits {commits}.
Each way runs the same step of the same model, in turns (`python -m benchmarks.gpu.equal_memory`). Plans allow the
class of levers that is named, and know no number of steps. {above} of {len(plans)} plans took more than their budgets,
by {share:.2%} at most: other ways had run before in the process, and the allocator gives out blocks up to 1 MiB larger.
"""
    ]
    for measured in record["results"]:
        ways = {name: row for name, row in measured["ways"].items() if "error" not in row}
        plain = ways["plain"]
        lines = [
            f"| {name} | {row['peak_bytes'] / MIB:,.0f} MiB | {row['peak_bytes'] / plain['peak_bytes']:.2f}x "
            f"| {row['step_seconds'] * 1e3:.1f} ms | {row['times_as_fast_as_checkpoint']:.2f}x "
            f"| {row['times_as_fast_as_plain']:.2f}x |"
            for name, row in sorted(ways.items(), key=lambda each: each[1]["peak_bytes"])
        ]
        title = f"{measured['model']}, {measured['size']} x {measured['length']}"
        head = f"| {title} | peak | of plain | step | as fast as the checkpoint | as plain |\n|---|---|---|---|---|---|"
        parts.append("\n".join([head, *lines]) + "\n")
    return "\n".join(parts)


def never_slower_on_a_card(record: Record) -> Sequence[tuple[str, str, bool | None]]:
    """A verdict for each model: is the fastest plan that takes no more than another way at least as fast?"""
    found = []
    for measured in record["results"]:
        ways = {name: row for name, row in measured["ways"].items() if "error" not in row}
        plans = [row for name, row in ways.items() if name.startswith("plan")]
        compared = []
        for name, other in ways.items():
            near = (NEAR * other["peak_bytes"], other["peak_bytes"])
            below = [plan["step_seconds"] for plan in plans if near[0] <= plan["peak_bytes"] <= near[1]]
            if below and name != "plain" and not name.startswith(("plan", "recompute")):
                compared.append((other["step_seconds"] / min(below), name))
        worst, beside = min(compared)
        text = (
            f"a plan is never slower than another way to run {measured['model']} on an H200 at an equal or lower peak"
        )
        found.append((text, f"{worst:.3f}x as fast, beside {beside}", worst >= 0.99))
    return found


def at_the_checkpoints_peak(record: Record, name: str, least: float) -> tuple[str, str, bool | None]:
    """A verdict: how much faster than PyTorch's checkpoint of every block the best plan at its measured peak is."""
    text = f"{name} on an H200 at the measured peak of PyTorch's per-block checkpoint: ≥ {least:.2f}x as fast"
    ways = next((each["ways"] for each in record["results"] if each["model"] == name), {})
    plans = {
        title: row for title, row in ways.items() if title.startswith("plan") and "checkpoint, every block" in title
    }
    ratios = {title.split()[1]: row.get("times_as_fast_as_checkpoint") for title, row in plans.items()}
    if not any(ratios.values()):
        return (
            text,
            "; ".join(f"{title.split()[1]}: {row['error'].split(',')[0]}" for title, row in plans.items()),
            False,
        )
    figures = ", ".join(f"{ratio:.3f}x {kind}" for kind, ratio in ratios.items() if ratio)
    return text, figures, max(ratio for ratio in ratios.values() if ratio) >= least


def at_half_the_activations(record: Record, name: str) -> tuple[str, str, bool | None]:
    """A verdict: the time of the fastest plan that takes at most half of the plain step's activations."""
    each = next(each for each in record["results"] if each["model"] == name)
    held = 4 * each["parameter_bytes"]  # weights, gradients, two moments
    half = held + (each["ways"]["plain"]["peak_bytes"] - held) / 2
    below = [
        row["times_as_fast_as_plain"]
        for title, row in each["ways"].items()
        if title.startswith("plan") and row.get("peak_bytes", half + 1) <= half
    ]
    longer = 1 / max(below) - 1
    return f"{name} on an H200, half of the activations: ≤ 2% longer than plain", f"{longer:.1%}", longer <= 0.02


def quarter_of_the_peak(record: Record, name: str) -> tuple[str, str, bool | None]:
    """A verdict: the time of the fastest plan with a quarter of the plain peak."""
    ways = next(each["ways"] for each in record["results"] if each["model"] == name)
    most = 0.25 * ways["plain"]["peak_bytes"]
    plans = [row for title, row in ways.items() if title.startswith("plan") and row.get("peak_bytes", most + 1) <= most]
    taken = 1 / max(row["times_as_fast_as_plain"] for row in plans)
    return f"{name} on an H200, a quarter of the plain peak: ≤ 0.75x of plain's time", f"{taken:.2f}x", taken <= 0.75


def seconds_of_steps(record: Record) -> Sequence[tuple[str, str, bool | None]]:
    """Verdicts on predicted seconds, of the steps of the last commit."""
    now = {"cases": [row for row in record["cases"] if row["commit"] == record["environment"]["commit"]]}
    found = errors(now, "step_seconds")
    median, worst = statistics.median(found), found[-1]
    return [
        (f"step time on an H200, median error ≤ 5% ({len(found)} steps)", f"{median:.1%}", median <= 0.05),
        ("step time on an H200, worst error ≤ 12%", f"{worst:.0%}", worst <= 0.12),
    ]


def loss_head(record: Record) -> Sequence[tuple[str, str, bool | None]]:
    """Verdicts on the loss head in chunks."""
    extra, taken = record["extra_of_plain"], record["sides"]["chunked"]["of_plain"]
    return [
        ("loss head on an H200, extra memory ≤ 4% of plain", f"{extra:.1%}", extra <= 0.04),
        ("loss head on an H200, time ≤ 0.75x of plain", f"{taken:.2f}x", taken <= 0.75),
    ]


def offload(record: Record) -> Sequence[tuple[str, str, bool | None]]:
    """Verdicts on whole blocks that are offloaded by hand."""
    first, link = record["results"][0], record["link_bytes_per_second"]["to_host/pinned"]
    share, longer = first["share_of_activations"], first["added_time"]
    rate = min(row["copy_bytes_per_second"] for row in record["results"]) / link
    what = "one whole block offloaded by hand on an H200: ≥ 12% of the activations at ≤ 1% of time"
    return [
        (what, f"{share:.1%} at {longer:+.0%}", share >= 0.12 and longer <= 0.01),
        ("copies inside a step ≥ 90% of the link's rate", f"{rate:.0%} of {link / 1e9:.1f} GB/s", rate >= 0.9),
    ]


def optimizer_on_the_host(record: Record) -> Sequence[tuple[str, str, bool | None]]:
    """Verdicts on what an optimizer on the host leaves of the throughput."""
    kept = {name: side["throughput_of_adamw"] for name, side in record["sides"].items() if name != "adamw"}
    return [
        (f"{name} on an H200, 16k tokens: ≥ 92% of AdamW's throughput", f"{share:.0%}", share >= 0.92)
        for name, share in kept.items()
    ]


def streamed_on_a_card(record: Record) -> str:
    """The section of docs/benchmarks.md about weights that are streamed."""
    where = record["environment"]
    lines = [_streamed(row, row["predicted"], row["measured"]) for row in record["results"]]
    return f"""\
## Weights streamed, on a card

{where["machine"]["gpu"]}, torch {where["versions"]["torch"]}, commit {where["commit"][:7]}
(`python -m benchmarks.gpu.streamed`). The plans were made on a machine without a card, from published figures of this
one. After three steps its allocator was bounded half a GiB above each budget, as that of a small card is. In those
three, by repeatable kernels, losses and trained weights are the bits of the first row of the same training. Models have
new bf16 weights of the published shapes, built on the card, so their way through the host is not in its peak. The
process itself takes what the row without a budget has; CUDA's libraries and the driver are in no prediction of it.

Rows with 23 GiB, and all weights in 7 GiB, took less than predicted: repeatable kernels are another attention, so their
blocks met other operators than planned in their first run, said so, and kept other results.

| training | budget | blocks streamed | predicted | measured | host | seconds predicted | measured | bits equal |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


def _streamed(row: Record, predicted: Record, measured: Record) -> str:
    return (
        f"| {row['model']}, {row['work']}, {row['size']} x {row['length']} | {row['budget'] or 'none'} "
        f"| {measured['streamed_blocks']} | {predicted['peak_bytes']:,} | {measured['peak_bytes']:,} "
        f"| {measured['host_peak_bytes'] / 2**30:.1f} GiB | {predicted['step_seconds']:.2f} s "
        f"| {measured['step_seconds']:.2f} s | {'yes' if row['equal'] else 'NO'} |"
    )


def on_null_cards(record: Record) -> str:
    """The section of docs/accuracy.md about the suite for cards, run on null ones."""
    lines = [_null_card(card, found) for card, found in record["cards"].items()]
    of_rows = [
        row.get("commit", f["environment"]["commit"])[:7] for f in record["cards"].values() for row in f["cases"]
    ]
    commits = dict.fromkeys(of_rows)
    return f"""\
## The suite for cards, on null cards

`python -m benchmarks.gpu` on each, all its 47 steps and plans; commits {", ".join(commits)}. Out of memory is
a plain step beyond the card, or a plan that was refused; seconds are the host's, and not compared. What is not to the
byte is the hole that a decoder built on the card leaves where its rotary table was computed, and with several
micro-batches 512 bytes: the loss of the earlier ones, which is counted since (`notes/null-card.md`).

| card | ran | allocated to the byte | worst | reserved within 0.1% | plans | over budget | out of memory |
|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


def _null_card(card: str, found: Record) -> str:
    ran = [row for row in found["cases"] if "measured" in row]
    exact = sum(row["predicted"]["peak_bytes"] == row["measured"]["peak_bytes"] for row in ran)
    worst = max(abs(row["predicted"]["peak_bytes"] / row["measured"]["peak_bytes"] - 1) for row in ran)
    near = sum(abs(row["predicted"]["reserved_bytes"] / row["measured"]["reserved_bytes"] - 1) <= 1e-3 for row in ran)
    plans = [row for row in ran if "budget_bytes" in row["predicted"]]
    above = sum(row["measured"]["peak_bytes"] > row["predicted"]["budget_bytes"] for row in plans)
    full = sum(
        any(word in row.get("error", "") for word in ("OutOfMemoryError", "CannotFit")) for row in found["cases"]
    )
    return f"| {card} | {len(ran)} | {exact} | {worst:.3%} | {near} | {len(plans)} | {above} | {full} |"
