"""Do two hundred planned steps train as two hundred plain ones?

    python benchmarks/planned_steps.py --output benchmarks/results/planned_steps.json --png docs/planned_steps.png

A small decoder is trained twice on the default corpus, from the same seed, in fp32: without a budget, and with half of
the plain step's peak as its budget and levers that are bit-exact. Every loss, every gradient norm and the weights' file
at the end have to be the same to the last bit; otherwise nothing is written and the command fails. The peaks are those
that the CPU allocator records of the second and the last step.

The plan is made with the figures of a device that results/step_time.json holds, not with a calibration of the machine
that runs this: so the plan is the same everywhere. Its seconds are that device's.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from environment import ROOT, environment
from tightfit.devices.present import cache_path
from tightfit.planner.report.picture import BUDGET_COLOUR, HEADROOM, HEIGHT, PALETTE, new_figure, png
from tightfit.training.api import train
from tightfit.training.config import parse_config
from tightfit.units import format_bytes

FIGURES = ROOT / "benchmarks" / "results" / "step_time.json"
SHAPE = {"hidden_size": 192, "num_layers": 6, "num_heads": 6, "vocab_size": 1024, "max_position_embeddings": 256}
SMALL = {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
STEPS, SMALL_STEPS, DOCUMENTS, BATCH = 200, 5, 80, 8
BUDGET = "0.5x"
SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    # A plan that is measured slow must not give way to another one in the middle of a comparison.
    "planned": {"budget": BUDGET, "levers": "exact", "max_slowdown": None},
}
_YEAR = 365 * 24 * 3600


@contextmanager
def simulated_device(figures: Mapping[str, Any]) -> Iterator[None]:
    """Inside, one thread of this machine's CPU has these figures, from a cache of its own.

    Threads that wait for each other on a busy machine take many times as long as one.
    """
    before, threads = os.environ.get("TIGHTFIT_CACHE"), torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TIGHTFIT_CACHE"] = folder
        try:
            path = cache_path("cpu")
            path.write_text(json.dumps(figures))
            later = time.time() + _YEAR  # figures of a busy hour are else measured again
            os.utime(path, (later, later))
            yield
        finally:
            torch.set_num_threads(threads)
            os.environ.pop("TIGHTFIT_CACHE")
            if before is not None:
                os.environ["TIGHTFIT_CACHE"] = before


def trained(side: str, folder: Path, small: bool, steps: int) -> dict[str, Any]:
    """The figures of one training, its losses and gradient norms step by step among them."""
    shape = SMALL if small else SHAPE
    length = shape["max_position_embeddings"]
    config = {
        "model": shape,
        "data": {
            "source": str(ROOT / "README.md") if small else "default",
            "max_documents": DOCUMENTS,
            "sequence_length": length,
            "vocab_size": shape["vocab_size"],
            "validation_fraction": 0.01,
        },
        "training": {"max_steps": steps, "batch_size": BATCH, "warmup_steps": steps // 20, "device": "cpu"},
        "memory": SIDES[side],
        "output": {"folder": str(folder)},
    }
    result = train(parse_config(config))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plan = folder / "plan.json"
    return {
        "losses": [line["loss"] for line in lines],
        "gradient_norms": [line["grad_norm"] for line in lines],
        "held_out_loss": result.validation_loss,
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "plain_peak_bytes": result.plain_peak_bytes,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "measured_peak_bytes": result.measured_peak_bytes,
        "budget_bytes": result.budget_bytes,
        "parameters": result.parameters,
        "levers": json.loads(plan.read_text())["choices"] if plan.exists() else [],
    }


def demand_identical(sides: Mapping[str, Mapping[str, Any]], steps: int) -> None:
    """The planned training computed what the plain one did, and kept to its budget."""
    plain, planned = sides["plain"], sides["planned"]
    assert len(plain["losses"]) == steps
    for key in ("losses", "gradient_norms", "held_out_loss", "weights_sha256"):
        assert plain[key] == planned[key], f"{key}: the planned training has others than the plain one"
    assert planned["levers"], "the plan has no lever, so nothing was compared"
    assert planned["measured_peak_bytes"] <= planned["budget_bytes"], "the planned step exceeds its budget"


def draw(sides: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The losses of both trainings on one axis, their differences below, and their peaks beside."""
    plain, planned = sides["plain"], sides["planned"]
    steps = range(1, len(plain["losses"]) + 1)
    figure = new_figure(HEIGHT)
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1), height_ratios=(4, 1))
    losses, apart, peaks = (figure.add_subplot(place) for place in (grid[0, 0], grid[1, 0], grid[:, 1]))
    losses.plot(steps, plain["losses"], color=PALETTE[5], linewidth=6, label="plain", solid_capstyle="round")
    losses.plot(steps, planned["losses"], color="#000000", linewidth=1.2, label=f"planned, budget {BUDGET} of plain")
    losses.set_ylabel("loss (nats a token)")
    losses.set_title(f"{len(steps)} steps in fp32: the same loss in every one, to the last bit")
    losses.legend(frameon=False)
    differences = [one - other for one, other in zip(planned["losses"], plain["losses"], strict=True)]
    apart.plot(steps, differences, color=PALETTE[0], linewidth=2)
    apart.set_ylim(-1e-7, 1e-7)
    apart.set_ylabel("planned - plain")
    apart.set_xlabel("optimizer steps")
    measured = [side["measured_peak_bytes"] / 2**20 for side in (plain, planned)]
    bars = peaks.bar(("plain", "planned"), measured, color=(PALETTE[5], PALETTE[0]), width=0.6)
    peaks.bar_label(bars, [format_bytes(side["measured_peak_bytes"]) for side in (plain, planned)], padding=3)
    budget = planned["budget_bytes"]
    peaks.axhline(budget / 2**20, color=BUDGET_COLOUR, linestyle="--", label=f"budget {format_bytes(budget)}")
    peaks.set_ylim(0, HEADROOM * max(measured))
    peaks.set_ylabel("measured peak of a step (MiB)")
    peaks.set_title("Peak memory")
    peaks.legend(frameon=False)
    for axis in (losses, apart, peaks):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3, axis="y")
    return png(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help=f"{SMALL_STEPS} steps of a tiny decoder on the README")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args(arguments)
    steps = SMALL_STEPS if options.small else STEPS
    figures = json.loads(FIGURES.read_text())["device"]
    with tempfile.TemporaryDirectory() as folder, simulated_device(figures):
        where = environment()
        sides = {name: trained(name, Path(folder) / name, options.small, steps) for name in SIDES}
    demand_identical(sides, steps)
    for name, side in sides.items():
        print(f"{name}: {steps} steps, measured peak {format_bytes(side['measured_peak_bytes'])}", end="; ")
    print("every loss, every gradient norm and the weights at the end are identical")
    found = {
        "environment": where,
        "small": options.small,
        "shape": SMALL if options.small else SHAPE,
        "batch": BATCH,
        "steps": steps,
        "device_figures": figures["name"],
        "sides": sides,
    }
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    if options.png:
        options.png.write_bytes(draw(sides))


if __name__ == "__main__":
    main()
