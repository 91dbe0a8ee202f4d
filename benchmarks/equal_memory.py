"""At the measured peak of PyTorch's per-block checkpoint: how much faster is the plan?

    python benchmarks/equal_memory.py --output benchmarks/results/equal_memory.json

The cases are those of peers.py (CPU26: hidden 512, 8 layers, 8 heads, 2 kv heads, SwiGLU, vocabulary 6400, batch
4 x 256), in fp32 with AdamW. Steps of all variants are interleaved; a ratio is the median of the ratios within one
round. Peaks are the CPU allocator's own record. A plan leaves a KiB of its budget free, so the budget is the measured
peak and that KiB: the plan's predicted peak is at most the checkpoint's measured one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from environment import environment
from peer_trainings import REFERENCE, Steps, adamw, applied
from peers import CASES
from tightfit import compile_blocks, estimate, plan, recompute
from tightfit.errors import CannotFit, CompileError
from tightfit.planner.levers import ChunkedLoss
from tightfit.planner.search.candidates import UNSEEN_BYTES

LEVERS = {
    "exact": "exact",
    "captured": ["exact", "capture"],
    "rounding": "rounding",
    "captured rounding": ["rounding", "capture"],
    "compile": ["recompute", "chunked_loss", "micro_batch", "compile"],
}


def compare(case: str, rounds: int, names: Sequence[str]) -> dict:
    torch.manual_seed(0)
    model, batch, glob = CASES[case].build(), CASES[case].batch.tensors(), CASES[case].glob
    steps = Steps(model, batch, adamw(model.parameters()))
    steps.run(1)
    with applied(REFERENCE, model):
        steps.run(1)
        checkpoint_bytes = steps.peak(1)
    budget = checkpoint_bytes + UNSEEN_BYTES
    started = time.perf_counter()
    predicted = estimate(model, batch)
    estimate_seconds = time.perf_counter() - started
    plans, plan_seconds = {}, {}
    empty: dict[str, str] = {}
    for name in names:
        started = time.perf_counter()
        try:
            plans[name] = plan(model, batch, budget, levers=LEVERS[name])
        except CannotFit as error:
            empty[f"plan {name}"] = str(error)
        plan_seconds[name] = time.perf_counter() - started
    variants: dict[str, tuple[Callable[[], AbstractContextManager], int]] = {
        "plain": (nullcontext, 1),
        "pytorch checkpoint": (partial(applied, REFERENCE, model), 1),
        "recompute whole blocks": (lambda: recompute(model, glob), 1),
    }
    if "compile" in names:
        variants["compiled blocks"] = (lambda: compile_blocks(model, glob), 1)
        variants["compiled blocks, keep=0"] = (lambda: compile_blocks(model, glob, keep=0.0), 1)
    variants |= {f"plan {name}": (partial(plans[name].apply, model), plans[name].micro_batches) for name in plans}
    peaks = {}
    for name, (context, micro_batches) in variants.items():
        try:
            with context():
                steps.run(micro_batches)
                peaks[name] = steps.peak(micro_batches)
        except CompileError as error:  # PyTorch's compiler draws dropout again where it recomputes
            empty[name] = str(error)
    variants = {name: variant for name, variant in variants.items() if name not in empty}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    of_processor: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (context, micro_batches) in variants.items():
            with context():
                before = time.process_time()
                seconds[name].append(steps.run(micro_batches))
                of_processor[name].append(time.process_time() - before)
    base = seconds["pytorch checkpoint"]
    base_of_processor = of_processor["pytorch checkpoint"]
    return {
        "case": case,
        "checkpoint_bytes": checkpoint_bytes,
        "budget_bytes": budget,
        "estimate_seconds": estimate_seconds,
        "plan_seconds": plan_seconds,
        "plain_predicted_bytes": predicted.peak_bytes,
        "plans": {name: describe(made) for name, made in plans.items()},
        "variants": {
            name: {
                "peak_bytes": peaks[name],
                "median_seconds": statistics.median(times),
                "least_seconds": min(times),
                "times_as_fast_as_checkpoint": statistics.median(b / t for b, t in zip(base, times, strict=True)),
                "times_as_fast_by_processor_time": statistics.median(
                    b / t for b, t in zip(base_of_processor, of_processor[name], strict=True)
                ),
            }
            for name, times in seconds.items()
        },
        "empty": empty,
    }


def describe(made) -> dict:
    return {
        "peak_bytes": made.peak_bytes,
        "predicted_seconds": made.step_seconds,
        "predicted_plain_seconds": made.plain.step_seconds,
        "micro_batches": made.micro_batches,
        "chunked_loss": made.lever(ChunkedLoss) is not None,
        "compiled_shares": [choice.share for choice in made.choices],
        "captured_blocks": sum(choice.captured for choice in made.choices),
        "recompute_seconds": sum(choice.recompute_seconds for choice in made.choices),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: CPU26")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--levers", choices=LEVERS, action="append", help="default: all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    names = options.levers or list(LEVERS)
    where, results = environment(), []
    for case in options.case or ["CPU26"]:
        result = compare(case, options.rounds, names)
        results.append(result)
        print(f"{result['case']}: peak of PyTorch's per-block checkpoint {result['checkpoint_bytes']:,} B")
        for name, row in result["variants"].items():
            print(
                f"  {name:24s} {row['peak_bytes']:>13,} B  {row['median_seconds']:7.3f} s "
                f"(least {row['least_seconds']:.3f})  {row['times_as_fast_as_checkpoint']:.3f}x as fast "
                f"({row['times_as_fast_by_processor_time']:.3f}x by processor time)"
            )
        print(f"  estimate {result['estimate_seconds']:.2f} s, plans {result['plan_seconds']}")
        for name, reason in result["empty"].items():
            print(f"  {name:24s} {reason}")
        if options.output:
            options.output.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
