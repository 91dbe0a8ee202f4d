"""The project's targets for speed: each with the figure that was measured, and a verdict."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from accuracy_page import Record, gpu_page, rows, where
from peer_trainings import AGAINST_ACTIVATIONS

NO_CARD = "empty: not measured on a card"
BY_HAND = ("recompute whole blocks", "recompute, every block", "captured, keep all", "captured, recompute all")
FEW = 3  # peers: no verdict on fewer
NEAR = 0.9  # of a peak: a plan below that was made for another budget
# The files of results that verdicts are read from
EXACT, ROUNDING = ("exact", "captured"), ("rounding", "captured rounding")  # plans of equal_memory
UNCOMPILED = (*EXACT, *ROUNDING)
SOURCES = (
    "equal_memory", "peers", "step_time", "plan_time", "no_lever", "monitor_overhead", "captured", "executor_overhead"
)  # fmt: skip
Found = Mapping[str, Record]
Verdict = tuple[str, str, bool | None]  # target, figure, and whether it is met (None: not measured)
PRODUCTS = (
    "products recomputed in the blocks whose backward is at the peak, with compiled blocks 7% of a step "
    "(notes/planner.md, At the checkpoint's peak, on other shapes)"
)
DRIFT = (
    "the machine's own speed: a reference step of the calibration drifts between cases (docs/accuracy.md, Step time, "
    "has the drift and the errors beside it)"
)


def targets(found: Found) -> str:
    lines = []
    for name, make, cause in TARGETS:
        lines += [_row(name, *verdict, cause) for verdict in make(found)]
    sources = "\n".join(f"- {name}: {where(found[name])}" for name in SOURCES if name in found)
    table = rows("| | target | figure | verdict | cause |", lines)
    return f"## Targets\n\n{table}\nThe figures are of these machines and commits:\n\n{sources}\n"


def _row(name: str, target: str, figure: str, met: bool | None, cause: str) -> str:
    verdict = "not measured" if met is None else "met" if met else "missed"
    return f"| {name} | {target} | {figure} | {verdict} | {cause if met is False else ''} |"


def case_of(record: Record | None, name: str) -> Record | None:
    return next((each for each in record["results"] if each["case"] == name), None) if record else None


def plan_ratios(found: Found, case: str) -> dict[str, float]:
    """How much faster than PyTorch's per-block checkpoint each plan was at the checkpoint's measured peak."""
    measured = case_of(found.get("equal_memory"), case)
    if measured is None:
        return {}
    return {
        name.removeprefix("plan "): row["times_as_fast_as_checkpoint"]
        for name, row in measured["variants"].items()
        if name.startswith("plan ")
    }


def at_checkpoint(levers: Sequence[str], least: float, what: str) -> Callable[[Found], list[Verdict]]:
    def target(found: Found) -> list[Verdict]:
        ratios = {name: ratio for name, ratio in plan_ratios(found, "CPU26").items() if name in levers}
        text = f"CPU26 at the measured peak of PyTorch's per-block checkpoint, {what}: ≥ {least:.2f}x as fast"
        if not ratios:
            return [(text, "not measured", None)]
        best = max(ratios, key=lambda name: ratios[name])
        return [(text, f"{ratios[best]:.3f}x", ratios[best] >= least)]

    return target


def on_cards(*texts: str) -> Callable[[Found], list[Verdict]]:
    return lambda found: [(text, NO_CARD, None) for text in texts]


def of_a_card(name: str, make: Callable[[Record], Sequence[Verdict]]) -> Callable[[Found], Sequence[Verdict]]:
    """The verdicts of one file of a real card's results, where there is one."""
    return lambda found: make(found[name]) if name in found else []


def never_slower(found: Found) -> list[Verdict]:
    text = "a plan is never slower than another way to run CPU26 at an equal or lower measured peak"
    peers = found.get("peers")
    measured = case_of(peers if peers and peers["rounds"] else found.get("equal_memory"), "CPU26")
    timed = {name: row for name, row in (measured or {"variants": {}})["variants"].items() if "median_seconds" in row}
    compared = {name: r for name, r in beside_plans(timed).items() if any(word in name for word in AGAINST_ACTIVATIONS)}
    if not compared:
        return [(text, "not measured", None)]
    figure = ", ".join(f"{ratio:.3f}x as fast as {name}" for name, ratio in compared.items())
    if len(compared) < FEW:
        return [(text, f"{figure}; the other peers were not timed", None)]
    return [(text, figure, min(compared.values()) >= 1)]


def is_ours(name: str) -> bool:
    return name.startswith("plan ") or name in BY_HAND


def beside_plans(variants: Mapping[str, Record]) -> dict[str, float]:
    """For each other way at whose peak a plan was measured: how much faster the fastest such plan is."""
    found = {}
    for name, row in variants.items():
        beside = [
            plan["times_as_fast_as_checkpoint"]
            for own, plan in variants.items()
            if own.startswith("plan ") and NEAR * row["peak_bytes"] <= plan["peak_bytes"] <= row["peak_bytes"]
        ]
        if beside and not is_ours(name):
            found[name] = max(beside) / row["times_as_fast_as_checkpoint"]
    return found


def small_steps(found: Found) -> list[Verdict]:
    record = found.get("captured")
    if record is None:
        return [("whole blocks recomputed, never slower than PyTorch's checkpoint", "not measured", None)]
    lines: list[Verdict] = []
    for way in ("captured, recompute all", "recompute"):
        own = {case: sides[way]["of_checkpoint"] for case, sides in record["cases"].items()}
        figure = ", ".join(f"{ratio:.2f}x ({case})" for case, ratio in own.items())
        named = "captured blocks" if way.startswith("captured") else "the recorder"
        text = f"whole blocks recomputed by {named}: ≤ 1.0x of PyTorch's checkpoint"
        lines.append((text, figure, max(own.values()) <= 1))
    for way, bound in (("captured, keep all", 1.0), ("captured, keep all, compiled", 0.95)):
        side = record["cases"]["1 x 64"].get(way)
        if side is not None:
            named = f"captured blocks that keep everything{', compiled' if 'compiled' in way else ''}"
            kept = side["of_plain"]
            lines.append((f"{named}, 1 x 64: ≤ {bound}x of plain", f"{kept:.2f}x", kept <= bound))
    return lines


def launches(found: Found) -> list[Verdict]:
    record = found.get("executor_overhead")
    texts = (
        "a step that is all launches, captured blocks: ≤ 1.5x of plain",
        "the same by the recorder: ≤ the checkpoint's",
    )
    if record is None:
        return [(text, "not measured", None) for text in texts]
    ratios = {name: row["step_ratio"] for name, row in record["cases"].items()}
    captured = max(ratio for name, ratio in ratios.items() if name.startswith("captured"))
    recorded, theirs = ratios["recomputed"], ratios["torch checkpoint"]
    return [
        (texts[0], f"{captured:.2f}x", captured <= 1.5),
        (texts[1], f"{recorded:.2f}x, the checkpoint {theirs:.2f}x", recorded <= theirs),
    ]


def step_seconds(found: Found) -> list[Verdict]:
    record = found.get("step_time")
    text, worst_text = "step time, median error ≤ 5%", "step time, worst error ≤ 12%"
    if record is None:
        return [(text, "not measured", None), (worst_text, "not measured", None)]
    errors = sorted(abs(row["error"]) for row in record["results"])
    median, worst = statistics.median(errors), errors[-1]
    return [
        (f"{text} ({len(errors)} steps on a CPU)", f"{median:.1%}", median <= 0.05),
        (worst_text, f"{worst:.1%}", worst <= 0.12),
    ]


def questions(found: Found) -> list[Verdict]:
    record = found.get("plan_time")
    if record is None:
        return [("time of an estimate and of a plan's curve", "not measured", None)]
    lines: list[Verdict] = []
    for case, (estimate, curve) in record["targets"]["seconds"].items():
        taken = {row["question"]: row["answer_seconds"] for row in record["results"] if row["case"] == case}
        own = taken["estimate"]
        lines.append((f"estimate of {case} ≤ {estimate:.0f} s", f"{own:.2f} s", own <= estimate))
        if curve is not None:
            for kind in ("exact", "rounding"):
                own = taken[f"curve {kind}"]
                lines.append((f"plan and curve of {case}, {kind}, ≤ {curve:.0f} s", f"{own:.2f} s", own <= curve))
    limit, rss = record["targets"]["rss_bytes"], max(row["rss_bytes"] for row in record["results"])
    lines.append((f"memory ≤ {limit / 1e9:.0f} GB", f"{rss / 1e6:.0f} MB", rss <= limit))
    return lines


def nothing_applied(found: Found) -> list[Verdict]:
    lines: list[Verdict] = []
    trainer, monitor = found.get("no_lever"), found.get("monitor_overhead")
    text = "trainer without a lever ≤ 1.01x of a loop by hand"
    if not trainer:
        lines.append((text, "not measured", None))
    for case in trainer["cases"] if trainer else ():
        preset, size, length = case["case"]
        lines.append((f"{text} ({preset}, {size} x {length})", *_within_a_hundredth(case)))
    for name, case in (monitor["cases"] if monitor else {}).items():
        text = f"sampling monitor ≤ 1.01x ({name}, {' x '.join(map(str, case['batch']))})"
        lines.append((text, *_within_a_hundredth(case)))
    return lines


def _within_a_hundredth(case: Record) -> tuple[str, bool]:
    low, high = case["ratio_quartiles"]
    return f"{case['ratio']:.3f}x (quartiles {low:.3f}-{high:.3f})", case["ratio"] <= 1.01


TARGETS: tuple[tuple[str, Callable[[Found], Sequence[Verdict]], str], ...] = (
    (
        "T3",
        at_checkpoint(UNCOMPILED, 1.12, "the fastest plan without the compiler"),
        PRODUCTS,
    ),
    (
        "T3",
        of_a_card(
            "gpu_equal_memory",
            lambda record: [
                gpu_page.at_the_checkpoints_peak(record, "8B-width", 1.08),
                gpu_page.at_the_checkpoints_peak(record, "1B", 1.05),
                gpu_page.at_half_the_activations(record, "1B"),
            ],
        ),
        "8B width: the optimizer's step is the peak of both, and a plan counts what the allocator cannot split off; "
        "half of the activations: a third of the blocks is recomputed, and the loss runs in chunks",
    ),
    ("T4", never_slower, PRODUCTS),
    (
        "T4",
        of_a_card("gpu_equal_memory", gpu_page.never_slower_on_a_card),
        "the 8B width's plan left 1.2 GB of its budget, which plans use since",
    ),
    (
        "T5",
        of_a_card(
            "gpu_equal_memory",
            lambda record: [gpu_page.quarter_of_the_peak(record, name) for name in ("MM26", "MM104")],
        ),
        "nothing here runs faster than plain eager",
    ),
    ("T6", step_seconds, DRIFT),
    (
        "T6",
        of_a_card("gpu", gpu_page.seconds_of_steps),
        "calibrated while the machine prepared data; casts, unlike layouts and products with an odd vocabulary are "
        "timed apart since; launches differ between hosts with the same card",
    ),
    ("T6", on_cards("the chosen plan within 2% of the best measured candidate, H200"), ""),
    (
        "T8",
        of_a_card("gpu_loss_head", gpu_page.loss_head),
        "each chunk adds to the whole gradient of the weight, which is read and written as often as there are chunks",
    ),
    (
        "T9",
        of_a_card("gpu_offload", gpu_page.offload),
        "a block's copy takes four times as long as a block computes, and is fetched at its own backward alone; a plan "
        "offloads a little of each block",
    ),
    (
        "T10",
        of_a_card("gpu_optimizer_step", gpu_page.optimizer_on_the_host),
        "the host's update of 104M weights outlasts what the card computes meanwhile",
    ),
    ("T7", questions, "0.2-0.4 s for each traced point, at 40 µs a dispatch"),
    ("T11", nothing_applied, "rounds of these turns are 3% apart, so 1% cannot be told"),
    (
        "T11",
        lambda found: (
            [
                (f"{text}, on an H200", figure, met)
                for text, figure, met in nothing_applied({"no_lever": found["gpu_no_lever"]})
            ]
            if "gpu_no_lever" in found
            else []
        ),
        "metrics and their file, between two steps",
    ),
    (
        "T15",
        small_steps,
        "the recorder runs Python for each operator, and a captured block dynamo's guards for each call",
    ),
    ("T15", launches, "the recorder runs Python for each function"),
    ("T15", at_checkpoint(EXACT, 1.10, "exact levers"), PRODUCTS),
    ("T15", at_checkpoint(ROUNDING, 1.15, "levers exact to rounding"), PRODUCTS),
    ("T15", at_checkpoint(("compile",), 1.25, "compiled blocks"), PRODUCTS),
)
