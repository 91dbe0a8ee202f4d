"""Writes docs/benchmarks.md and its picture: what others reach beside what tightfit reaches.

    make benchmarks

The page is made from the files in benchmarks/results, which the benchmarks write. Nothing is measured here. A cell
without a figure says why.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy_page import RESULTS, ROOT, Record, gpu_page, rows, where
from benchmark_targets import Found, is_ours, targets
from peers_on_cards_page import on_null_cards
from streamed_page import below_the_weights, beside_peers, on_small_cards

PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "benchmarks.png"
MIB = 2**20
NOTABLE = 0.01  # of a step: a smaller gain is called one

HEAD = """\
# Benchmarks

Written by `make benchmarks` from `benchmarks/results/`. Ratios were measured side by side in one run, in turns. Cells
that need a card and were not measured on one are empty and say so. [accuracy.md](accuracy.md) has the predictions
one by one.
"""

# The files, and how each is made anew
COMMANDS = {
    "gpu": "python -m benchmarks.gpu --together 50 --output benchmarks/results/gpu.json",
    "gpu_equal_memory": "python -m benchmarks.gpu.equal_memory --output benchmarks/results/gpu_equal_memory.json",
    "gpu_streamed": "python -m benchmarks.gpu.streamed --plan plans && "
    "python -m benchmarks.gpu.streamed --run plans --output benchmarks/results/gpu_streamed.json",
    "gpu_loss_head": "python benchmarks/loss_head.py --device cuda --output benchmarks/results/gpu_loss_head.json",
    "gpu_no_lever": "python benchmarks/no_lever.py --device cuda --output benchmarks/results/gpu_no_lever.json",
    "gpu_optimizer_step": "python benchmarks/optimizer_step.py --device cuda "
    "--output benchmarks/results/gpu_optimizer_step.json",
    "gpu_offload": "python -m benchmarks.gpu.offload --output benchmarks/results/gpu_offload.json",
    "equal_memory": "python benchmarks/equal_memory.py --output benchmarks/results/equal_memory.json",
    "peers": "python benchmarks/peers.py --output benchmarks/results/peers.json",
    "peers_on_cards": "python -m benchmarks.peers_on_cards --packages FOLDER",
    "estimators": "python benchmarks/estimators.py --output benchmarks/results/estimators.json",
    "ablation": "python benchmarks/ablation.py --output benchmarks/results/ablation.json",
    "captured": "python benchmarks/captured.py --output benchmarks/results/captured.json",
    "executor_overhead": "python benchmarks/executor_overhead.py --output benchmarks/results/executor_overhead.json",
    "host_time": "python -m tightfit.devices.nullcard rtx4090 --memory 80GiB --no-copies -- "
    "python benchmarks/host_time.py --output benchmarks/results/host_time.json",
    "graphed_blocks": "python -m tightfit.devices.nullcard rtx4090 --memory 80GiB --no-copies -- "
    "python benchmarks/graphed_blocks.py --output benchmarks/results/graphed_blocks.json",
    "loss_head": "python benchmarks/loss_head.py --small --output benchmarks/results/loss_head.json",
    "step_time": "python benchmarks/step_time.py --output benchmarks/results/step_time.json",
    "plan_time": "python benchmarks/plan_time.py --output benchmarks/results/plan_time.json",
    "no_lever": "python benchmarks/no_lever.py --small --output benchmarks/results/no_lever.json",
    "monitor_overhead": "python benchmarks/monitor_overhead.py --output benchmarks/results/monitor_overhead.json",
    "optimizer_step": "python benchmarks/optimizer_step.py --small --output benchmarks/results/optimizer_step.json",
    "offload_step": "python benchmarks/offload_step.py --small --output benchmarks/results/offload_step.json",
    "streamed": "python benchmarks/streamed.py",
    "streamed_on_cards": "python -m benchmarks.streamed_on_cards --card .venv-card/bin/python",
    "streaming_peers": "python benchmarks/streaming_peers.py",
}


def state(record: Record) -> str:
    """The machine of a results file in a line, with how busy it was."""
    return f"{where(record)} Load when it began: {record['environment']['load_average']:.1f}."


# Time against peak


def equal_memory(record: Record) -> str:
    parts = [
        f"""\
## Time against peak

{state(record)}

Each way runs the same step of the same model, in turns. Peaks are the CPU allocator's own record. "As fast" is the
median of the ratios to PyTorch's per-block checkpoint within one round (`benchmarks/equal_memory.py`).
"""
    ]
    for measured in record["results"]:
        variants = measured["variants"]
        ordered = sorted(variants.items(), key=lambda each: each[1]["peak_bytes"])
        parts.append(
            rows(
                f"| {measured['case']} | whose | peak | of plain | step | as fast |",
                [variant_line(name, row, variants["plain"]) for name, row in ordered],
            )
        )
        parts.append(without(measured.get("empty", {})))
    return "\n".join(part for part in parts if part)


def without(empty: Mapping[str, str]) -> str:
    """The ways that did not run, each with its reason."""
    return "Empty:\n\n" + "\n".join(f"- {name}: {why}." for name, why in empty.items()) + "\n" if empty else ""


def variant_line(name: str, row: Record, plain: Record) -> str:
    return (
        f"| {name} | {'ours' if is_ours(name) else 'PyTorch'} | {row['peak_bytes'] / MIB:.1f} MiB "
        f"| {row['peak_bytes'] / plain['peak_bytes']:.2f}x | {row['median_seconds'] * 1e3:.0f} ms "
        f"| {row['times_as_fast_as_checkpoint']:.3f}x |"
    )


def every_peer(record: Record) -> str:
    """The same with every peer, each in a process of its own; peaks only where no steps were timed."""
    timed = record["rounds"] > 0
    how = (
        f'Processes take turns, {record["rounds"]} rounds; "as fast" is the median of the ratios to the checkpoint of '
        "every block within one round."
        if timed
        else f"Only peaks were measured: the machine was busy, so steps were not timed (`{COMMANDS['peers']}` does)."
    )
    parts = [
        f"""\
## Every peer

{state(record)}

Each way runs the same step of the same model in a process of its own, as its documentation shows (the sources are in
`benchmarks/peer_trainings.py`). Peaks are the CPU allocator's own record. {how} Plans were made for the peaks of peers.
"""
    ]
    for measured in record["results"]:
        ran = {name: row for name, row in measured["variants"].items() if "empty" not in row}
        empty = {name: row["empty"] for name, row in measured["variants"].items() if "empty" in row}
        plain = ran["plain"]["peak_bytes"]
        lines = [
            peer_line(name, row, plain) for name, row in sorted(ran.items(), key=lambda each: each[1]["peak_bytes"])
        ]
        parts.append(rows(f"| {measured['case']} | whose | peak | of plain | predicted | step | as fast |", lines))
        parts.append(without(empty))
    if record["left_out"]:
        parts.append(f"Not run yet: {', '.join(record['left_out'])}.\n")
    return "\n".join(part for part in parts if part)


def peer_line(name: str, row: Record, plain: int) -> str:
    predicted = "" if row.get("predicted_bytes") is None else f"{row['predicted_bytes'] / row['peak_bytes'] - 1:+.4%}"
    step = f"{row['median_seconds'] * 1e3:.0f} ms" if "median_seconds" in row else ""
    fast = f"{row['times_as_fast_as_checkpoint']:.3f}x" if "times_as_fast_as_checkpoint" in row else ""
    return (
        f"| {name} | {'ours' if row['ours'] else 'others'} | {row['peak_bytes'] / MIB:.1f} MiB "
        f"| {row['peak_bytes'] / plain:.2f}x | {predicted} | {step} | {fast} |"
    )


def drawn(found: Found) -> Record | None:
    """What the picture shows: every peer if they were timed, or else the plans at the checkpoint's peak."""
    peers = found.get("peers")
    return peers if peers and peers["rounds"] else found.get("equal_memory")


def draw(record: Record) -> bytes:
    """Step time against peak: what others have, numbered, and the line through our plans."""
    from tightfit.planner.report.picture import HEIGHT, new_figure, png

    cases = record["results"]
    figure = new_figure(1.6 * HEIGHT * len(cases))
    for axis, measured in zip(figure.subplots(len(cases), 1, squeeze=False)[:, 0], cases, strict=True):
        draw_case(axis, measured)
        axis.set_title(f"{measured['case']}, {record['environment']['machine']['cpu']}: blue is ours")
    return png(figure)


def draw_case(axis: Any, measured: Record) -> None:
    from tightfit.planner.report.picture import PALETTE

    points = dict(sorted(points_of(measured).items(), key=lambda each: each[1]))
    plans = [name for name in points if name.startswith("plan ")]
    line = lower_left([points[name] for name in (*plans, "plain") if name in points])
    axis.plot(*zip(*sorted(line), strict=True), color=PALETTE[0], linewidth=1.5, label="the line of our plans")
    for kind, mark in zip(dict.fromkeys(map(kind_of, plans)), "os^vP*", strict=False):
        own = [points[name] for name in plans if kind_of(name) == kind]
        axis.plot(*zip(*own, strict=True), mark, color=PALETTE[0], label=kind, linestyle="none")
    for number, name in enumerate((name for name in points if name not in plans), start=1):
        ours = measured["variants"][name].get("ours", is_ours(name))
        mark, colour = ("x", PALETTE[0]) if ours else ("D", PALETTE[1])
        axis.plot(*points[name], mark, color=colour, label=f"{number}  {name}", linestyle="none")
        axis.annotate(str(number), points[name], xytext=(5, 5), textcoords="offset points", fontsize=9)
    axis.set_xlabel("measured peak of a step (MiB)")
    axis.set_ylabel("step time, times plain")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=9, ncols=2)


def points_of(measured: Record) -> dict[str, tuple[float, float]]:
    """MiB of peak and times the plain step of each way, from ratios within a round: groups of processes ran at
    different times.
    """
    ratio = "times_as_fast_as_checkpoint"
    timed = {name: row for name, row in measured["variants"].items() if "median_seconds" in row}
    within = all(ratio in row for row in timed.values())
    taken = {name: 1 / row[ratio] if within else row["median_seconds"] for name, row in timed.items()}
    return {name: (row["peak_bytes"] / MIB, taken[name] / taken["plain"]) for name, row in timed.items()}


def kind_of(plan: str) -> str:
    """The levers of a plan, without its budget."""
    return plan.partition(" at ")[0]


def lower_left(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, by rising peak, that no earlier one beats."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


# Estimators


def estimators(record: Record) -> str:
    results = record["results"]
    on_cpu = [row for row in results if row["card"] is None]
    cards = [row for row in results if row["card"] is not None]
    names = ["tightfit", *record["estimators"]]
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    header = "| estimator | counts | asked | median error | worst error | short | short by 0.1% |"
    missing = max(row["measured"] - row["answers"]["tightfit"]["bytes"] for row in on_cpu)
    return (
        f"""\
## Estimators of the peak

{state(record)} Packages: {packages}.

The same training steps with AdamW go to each estimator (`benchmarks/estimators.py`). The truth is the CPU allocator's
own record of the second step, measured in a process of its own: {len(on_cpu)} steps of decoders of 14 to 135 million
parameters, in fp32, under autocast in bf16, and with weights in bf16; with and without checkpointed blocks. "Short"
counts the steps that needed more than the estimate: with that budget they would have run out of memory. The last column
counts those that needed at least 0.1% more. Estimators are asked only for steps that they are made for. Ours is short
by {missing} bytes at most; a plan leaves 1 KiB of its budget free.

"""
        + rows(header, [estimator_line(record, who, on_cpu, "cpu") for who in names])
        + """
MemTracker is nearly as near as we are. It executes the step, or the step's operators on fake tensors, and the tensors
that it sees are not yet an allocator's peak on a card.
"""
        + (on_published(record, names, cards, header) if cards else "")
        + "\nWhere they come from:\n\n"
        + "\n".join(f"- {who}: {each['source']}." for who, each in record["estimators"].items())
        + "\n"
    )


def on_published(record: Record, names: Sequence[str], cards: Sequence[Record], header: str) -> str:
    answered = [who for who in names if record["published"][who]["cells"]]
    silent: dict[str, list[str]] = {}
    for who in names:
        if who not in answered:
            reasons = dict.fromkeys(reason(row["answers"][who]) for row in cards)
            silent.setdefault("; ".join(reasons), []).append(who)
    return (
        f"""
{len(cards)} whole trainings on an A100 40GB, measured and published by litgpt ([accuracy.md](accuracy.md)):

"""
        + rows(header, [estimator_line(record, who, cards, "published") for who in answered])
        + "\nEmpty:\n\n"
        + "\n".join(f"- {', '.join(whose)}: {why}." for why, whose in silent.items())
        + "\n"
    )


def estimator_line(record: Record, who: str, asked: Sequence[Record], group: str) -> str:
    counts = "everything" if who == "tightfit" else record["estimators"][who]["counts"]
    figures = record[group][who]
    if not figures["cells"]:
        reasons = dict.fromkeys(reason(row["answers"][who]) for row in asked)
        return f"| {who} | {counts} | 0 | empty: {'; '.join(reasons)} | | | |"
    failed = sum("failed" in row["answers"][who] or "missing" in row["answers"][who] for row in asked)
    note = f", {failed} failed" if failed else ""
    median, worst = percent(figures["median"], ""), percent(figures["worst"], "+")
    return (
        f"| {who} | {counts} | {figures['cells']}{note} | {median} | {worst} "
        f"| {figures['short']} | {figures['notably_short']} |"
    )


def percent(share: float, sign: str) -> str:
    digits = 6 if abs(share) < 1e-4 else 2 if abs(share) < 0.1 else 1
    return f"{share:{sign}.{digits}%}"


def reason(answer: Record) -> str:
    return next(str(value) for key, value in answer.items() if key != "bytes")


# Ablation

RULES = {
    "greedy": "greedy: whatever saves the most seconds for each byte, from the least peak up",
    "one rule": "one rule for all blocks of a kind: the fastest that fits",
    "whole blocks": "whole blocks recomputed, as many as needed",
}


def ablation(record: Record) -> str:
    results = record["results"]
    return f"""\
## What the exact choice is worth

{where(record)}

The planner's choice inside blocks against simpler ones among the same priced options, at the same budget, each traced
as applied (`benchmarks/ablation.py`). Seconds are predicted: on cards by their published rates, on the CPU by made-up
round figures. The budget is a share of the way from the least peak of recompute (0%) to the plain peak. A figure says
how much longer a step takes than with the exact choice.

{chr(10).join(gain_line(results, rule) for rule in RULES)}

""" + rows(
        "| model | batch | device | budget | exact, over plain | greedy | one rule | whole blocks |",
        [ablation_line(row) for row in results],
    )


def longer(row: Record, rule: str) -> float | None:
    own = row["choices"][rule]
    return None if own is None else own["seconds"] / row["choices"]["exact"]["seconds"] - 1


def gain_line(results: Sequence[Record], rule: str) -> str:
    gains = [gain for row in results if (gain := longer(row, rule)) is not None]
    small = sum(gain < NOTABLE for gain in gains)
    unfit = len(results) - len(gains)
    return (
        f"- {RULES[rule]}. Median {statistics.median(gains):+.2%}, worst {max(gains):+.2%} over {len(gains)} budgets. "
        f"The exact choice wins under 1% in {small} of them"
        f"{f'; of {len(results)} budgets {unfit} cannot be met by this rule' if unfit else ''}."
    )


def ablation_line(row: Record) -> str:
    gains = {rule: longer(row, rule) for rule in RULES}
    cells = " | ".join("does not fit" if gain is None else f"{gain:+.2%}" for gain in gains.values())
    added = row["choices"]["exact"]["seconds"] / row["plain_seconds"] - 1
    batch = " x ".join(map(str, row["batch"]))
    return (
        f"| {row['case']}, {row['precision']} | {batch} | {row['device']} | {row['share']:.0%} "
        f"({row['budget_bytes'] / MIB:,.0f} MiB) | {added:+.2%} | {cells} |"
    )


# Single levers


def captured(record: Record) -> str:
    cases = record["cases"]
    ways = list(next(iter(cases.values())))
    lines = [
        f"| {case} | " + " | ".join(f"{sides[way]['of_plain']:.2f}x" for way in ways) + " |"
        for case, sides in cases.items()
    ]
    others = [way for way in ways if not all(sides[way]["bit_equal"] for sides in cases.values())]
    equal = "Gradients are bit-equal to the plain ones"
    equal = f" {equal}, but for: {', '.join(others)}." if others else f" {equal}."
    return f"""\
## Small steps: captured blocks, the recorder and PyTorch's checkpoint

{state(record)}

A decoder of width {record["shape"]["hidden_size"]} with {record["shape"]["num_layers"]} blocks, fp32. Processor seconds
of forward and backward, of plain.{equal}

""" + rows("| batch | " + " | ".join(ways) + " |", lines)


def executor_overhead(record: Record) -> str:
    lines = [
        f"| {name} | {row['step_ratio']:.2f}x | {row['added_forward_us_per_operator']:.1f} µs "
        f"| {row['added_backward_us_per_operator']:.1f} µs |"
        for name, row in record["cases"].items()
    ]
    return f"""\
## A step that is all launches

{state(record)}

A block of operators too small to take time: what is left is the executor's own cost.

""" + rows("| | step, of plain | added in forward, an operator | added in backward, an operator |", lines)


def host_time(record: Record) -> str:
    cases = record["cases"]
    ways = [way for way, side in next(iter(cases.values())).items() if isinstance(side, dict)]
    lines = [
        f"| {case} | " + " | ".join(f"{sides[way]['of_plain']:.2f}x" for way in ways) + " |"
        for case, sides in cases.items()
    ]
    return f"""\
## The host's time on CUDA's path

{state(record)} On a null card, which computes and copies nothing: what is measured is Python, the dispatcher and
autograd on the real CUDA path, and neither a driver nor a kernel.

Processor time of forward and backward, of plain; the plan is exact, at {record["budget"]} of plain, for a training of
100,000 steps. Blocks of models of `transformers` fill a cache of keys and values in training. By hand, recompute runs
captured blocks where it can; "recorded" is what stands in elsewhere.

""" + rows("| | " + " | ".join(ways) + " |", lines)


def graphed_blocks(record: Record) -> str:
    shares = [
        row["of_memory"]
        for cards in record["crossings"].values()
        for found in cards.values()
        for row in found["by_rows"].values()
        if row["launches_of_kernels"] > 1
    ]
    lines = [
        f"| {name}, {record['tokens'][name]} tokens, {card} | {of_the_card(found)} | {at_the_edge(found)} |"
        for name, cards in record["crossings"].items()
        for card, found in cards.items()
    ]
    of_graphs = [
        f"| {precision} | {way} | {side['seconds'] * 1e3:.1f} ms | {side['reserved_bytes'] / MIB:,.0f} MiB |"
        for precision, ways in record["graphs"].items()
        for way, side in ways.items()
    ]
    return (
        f"""\
## CUDA graphs of blocks: where launches decide

{state(record)}

A graph launches its kernels together, which saves time only where launches take longer than the kernels. By the two
clocks of `estimate`, for a plain step of all weights with AdamW in 16-bit autocast: the largest batch (in powers of
two, up to 64) at which they do, with the share of the card's memory that it takes, and the launches of the largest
that the card holds.

"""
        + rows("| | launches take longer up to | at the largest batch that fits |", lines)
        + f"""
None of these steps waits for launches if it takes more than {max(shares, default=0):.1%} of its card, so plans make no
graphs. PyTorch's own graphs of blocks (`torch.cuda.make_graphed_callables`, which keep all for backward) on a null
card, {record["graphed"]}: the host's time of forward and backward, and the bytes that PyTorch reserves.

"""
        + rows("| | | host | reserved |", of_graphs)
    )


def of_the_card(found: Record) -> str:
    most = found["launches_longer_up_to"]
    if not most:
        return "no batch"
    return f"{most} row{'s' * (most > 1)}, {found['by_rows'][str(most)]['of_memory']:.1%} of the card"


def at_the_edge(found: Record) -> str:
    largest, figures = list(found["by_rows"].items())[-1]
    return f"{figures['launches_of_kernels']:.0%} of the kernels' time ({largest} rows)"


def sides(title: str, what: str, extra: Mapping[str, str]) -> Callable[[Record], str]:
    """A section of a benchmark of single levers: its sides, their time of plain, and further columns."""

    def section(record: Record) -> str:
        lines = [
            f"| {name} | {side['of_plain']:.2f}x | " + " | ".join(shown(side.get(key)) for key in extra) + " |"
            for name, side in record["sides"].items()
        ]
        header = "| | time, of the first | " + " | ".join(extra.values()) + " |"
        return f"## {title}\n\n{state(record)} {what}\n\n" + rows(header, lines)

    return section


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.2f}"


SECTIONS: dict[str, Callable[[Record], str]] = {
    "equal_memory": equal_memory,
    "gpu_equal_memory": gpu_page.equal_memory_on_a_card,
    "gpu_streamed": gpu_page.streamed_on_a_card,
    "peers": every_peer,
    "peers_on_cards": on_null_cards,
    "estimators": estimators,
    "ablation": ablation,
    "captured": captured,
    "executor_overhead": executor_overhead,
    "host_time": host_time,
    "graphed_blocks": graphed_blocks,
    "loss_head": sides(
        "Loss head",
        "At small size on a CPU. On a card (vocabulary 128256, 16k tokens): T8 among the targets.",
        {"extra_bytes": "extra bytes", "gradient_error": "gradient error"},
    ),
    "offload_step": sides(
        "Offload of activations",
        "At small size on a CPU, where copies take the cores of the step. On a card: T9 among the targets.",
        {"activations_of_plain": "activations, of plain"},
    ),
    "optimizer_step": sides(
        "Optimizers",
        "At small size on a CPU. On a card: T10 among the targets.",
        {"bytes_per_parameter": "bytes a parameter"},
    ),
    "streamed": below_the_weights,
    "streamed_on_cards": on_small_cards,
    "streaming_peers": beside_peers,
}


def records(results: Path = RESULTS) -> dict[str, Record]:
    """The files of results that are there."""
    paths = {name: results / f"{name}.json" for name in COMMANDS}
    return {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()}


def page(found: Found) -> str:
    """The page, of what was measured."""
    parts = [HEAD]
    if drawn(found) is not None:
        parts.append("![Step time against the measured peak of a step](benchmarks.png)\n")
    parts.append(targets(found))
    for name, section in SECTIONS.items():
        if name in found:
            parts.append(section(found[name]))
        else:
            parts.append(
                f"## {name.replace('_', ' ').capitalize()}\n\nNot measured at this commit: `{COMMANDS[name]}`.\n"
            )
    commands = "\n".join([*COMMANDS.values(), "make benchmarks"])
    parts.append(f"## To measure again\n\nOn a machine without other work:\n\n```bash\n{commands}\n```\n")
    return "\n".join(parts)


def main() -> None:
    found = records()
    PAGE.write_text(page(found), encoding="utf-8")
    shown_in_it = drawn(found)
    if shown_in_it is not None:
        PICTURE.write_bytes(draw(shown_in_it))


if __name__ == "__main__":
    main()
