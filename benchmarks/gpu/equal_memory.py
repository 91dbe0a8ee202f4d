"""Time against peak on the GPU: plain, what others do, and our plans at the peaks of others, on one model in one run.

python -m benchmarks.gpu.equal_memory --output benchmarks/results/gpu_equal_memory.json
python -m benchmarks.gpu.equal_memory --small --output /tmp/small.json        (on the CPU)

Each model has a process of its own. All of them measure peaks side by side, each plan is made in a process of its own;
then one after the other takes time, with `--pause` when a line comes from the standard input: before that the machine
may do other things.

Ways take turns in rounds: each warms up, then its steps are timed. A ratio is the median of the ratios to PyTorch's
checkpoint of every block within one round. Peaks are the allocator's own. A way that fails is kept with its reason.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.gpu.cases import MODELS
from benchmarks.gpu.measuring import fresh_device
from benchmarks.peer_trainings import PEERS, REFERENCE, Steps, applied
from torch import nn

from tightfit import Plan, TokenBatch, plan, recompute
from tightfit.devices.present import lookup
from tightfit.errors import CannotFit
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.tracing.build import build_dry

SIZES = {"MM26": (32, 512), "MM104": (32, 512), "1B": (4, 4096), "8B-width": (1, 8192)}
LARGE = {"1B", "8B-width"}  # whose activations take much of a host's memory
SMALL = {"tiny": (4, 96)}
OTHERS = tuple(name for name in PEERS if "checkpoint" in name and "'" not in name)
AT = (REFERENCE, "torch.utils.checkpoint, every 2nd block", "selective checkpoint, every 2nd product kept")
SHARES = ("0.5x", "0.25x")  # of the plain peak
LEVERS = ("exact", "rounding", "rounding, compile")
ROUNDS, WARM_UP, TIMED = 3, 1, 2


@contextmanager
def offloading(model: nn.Module) -> Iterator[None]:
    """PyTorch's own way to hold activations on the host."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        yield


class CaseSteps(Steps):
    """Steps of a case, in bf16 on a device."""

    def __init__(self, name: str, size: int, length: int, device: torch.device):
        self.name, self.shape = name, TokenBatch(size, length, MODELS[name].vocabulary)
        torch.manual_seed(0)
        with device:
            model = MODELS[name].build()
        batch = {key: tensor.to(device) for key, tensor in self.shape.tensors().items()}
        super().__init__(model, batch, build_optimizer("adamw", model.parameters()), "bf16")


class Way:
    """One way to run the step: what it applies, and what was measured of it."""

    def __init__(self, applied: Callable[[], Any], **figures: Any):
        self.applied, self.figures = applied, figures
        self.micro_batches = figures.get("micro_batches", 1)
        self.rounds: list[float] = []

    def measure_peak(self, steps: Steps) -> None:
        try:
            with self.applied():
                for _ in range(WARM_UP):
                    steps.run(self.micro_batches)
                self.figures["peak_bytes"] = steps.peak(self.micro_batches)
        except Exception as error:
            self.figures["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        steps.optimizer.zero_grad()
        fresh_device(steps.device)

    def take_a_turn(self, steps: Steps) -> None:
        with self.applied():
            for _ in range(WARM_UP):
                steps.run(self.micro_batches)
            self.rounds.append(statistics.median(steps.run(self.micro_batches) for _ in range(TIMED)))


def compare(name: str, size: int, length: int, device: torch.device, rounds: int, parent: Connection) -> None:
    """One model: all ways with their peaks, and, when told, everybody's seconds in turns."""
    steps = CaseSteps(name, size, length, device)
    ways = dict(prepared(steps))
    parent.send("prepared")
    parent.recv()
    running = {title: way for title, way in ways.items() if "error" not in way.figures}
    for _ in range(rounds):
        for way in running.values():
            way.take_a_turn(steps)
    for way in running.values():
        way.figures["step_seconds"] = statistics.median(way.rounds)
        for against, base in (("checkpoint", running[REFERENCE].rounds), ("plain", running["plain"].rounds)):
            pairs = zip(base, way.rounds, strict=True)
            way.figures[f"times_as_fast_as_{against}"] = statistics.median(b / own for b, own in pairs)
    found = {title: way.figures for title, way in ways.items()}
    weights = sum(parameter.nbytes for parameter in steps.model.parameters())
    parent.send({"model": name, "size": size, "length": length, "parameter_bytes": weights, "ways": found})


def prepared(steps: CaseSteps) -> Iterator[tuple[str, Way]]:
    """The ways to run a step, with their peaks."""
    model = steps.model
    ways: dict[str, Way] = {"plain": Way(nullcontext)}
    ways |= {peer: Way(partial(applied, peer, model)) for peer in OTHERS}
    ways["recompute, every block"] = Way(lambda: recompute(model, "layers.*"))
    if steps.name not in LARGE:
        ways["save_on_cpu"] = Way(partial(offloading, model))
    steps.run(1)
    for title, way in ways.items():
        way.measure_peak(steps)
        yield title, way
    budgets = [(f"at the peak of {peer}", ways[peer].figures.get("peak_bytes")) for peer in AT]
    named = [(where, peak + UNSEEN_BYTES) for where, peak in budgets if peak] + [(f"at {s}", s) for s in SHARES]
    wanted = [
        (f"plan {levers} {where}", budget, levers) for (where, budget), levers in itertools.product(named, LEVERS)
    ]
    processes = min(len(wanted), max(1, (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        asked = [
            pool.submit(planned, steps.name, steps.shape, levers, budget, steps.device.type)
            for _, budget, levers in wanted
        ]
        for (title, _, _), answer in zip(wanted, asked, strict=True):
            written, figures = answer.result()
            way = Way(nullcontext, **figures) if written is None else planned_way(model, written, figures)
            if written is not None:
                way.measure_peak(steps)
            yield title, way


def planned(
    name: str, shape: TokenBatch, levers: str, budget: Any, device: str
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A plan as it is written, None if none fits, and its figures."""
    began = time.perf_counter()
    try:
        how: dict[str, Any] = {"levers": levers.split(", ") if ", " in levers else levers, "precision": "bf16"}
        made = plan(build_dry(MODELS[name].build), shape, budget, device=device, **how)
    except CannotFit as error:
        return None, {"error": str(error).splitlines()[0]}
    return made.to_dict(), {
        "budget_bytes": made.budget_bytes,
        "predicted_bytes": made.peak_bytes,
        "predicted_reserved_bytes": made.planned.reserved_bytes,
        "predicted_seconds": made.step_seconds,
        "levers": [lever.name for lever in made.levers],
        "micro_batches": made.micro_batches,
        "planning_seconds": time.perf_counter() - began,
    }


def planned_way(model: nn.Module, written: dict[str, Any], figures: dict[str, Any]) -> Way:
    made = Plan.from_dict(json.loads(json.dumps(written)))
    return Way(lambda: made.apply(model), **figures)


def line(title: str, figures: dict[str, Any]) -> str:
    """For the terminal."""
    if "error" in figures:
        return f"  {title}: {figures['error']}"
    words = f"{figures['peak_bytes']:,} bytes, {figures['step_seconds'] * 1e3:.1f} ms"
    if "predicted_bytes" in figures:
        words += (
            f" (predicted {figures['predicted_bytes'] / figures['peak_bytes'] - 1:+.3%}, "
            f"{figures['predicted_seconds'] / figures['step_seconds'] - 1:+.1%})"
        )
    against = (
        f"{figures['times_as_fast_as_checkpoint']:.3f}x checkpoint, {figures['times_as_fast_as_plain']:.3f}x plain"
    )
    return f"  {title}: {words}, {against}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pause", action="store_true", help="take time when a line comes from the standard input")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --small runs it on the CPU")
    device = torch.device("cpu" if options.small else "cuda")
    lookup(device, print, measured=True)
    content: dict[str, Any] = {"environment": environment(), "results": []}
    running = []
    for name, (size, length) in (SMALL if options.small else SIZES).items():
        if options.only in name:
            here, there = multiprocessing.Pipe()
            arguments = (name, size, length, device, options.rounds, there)
            multiprocessing.get_context("spawn").Process(target=compare, args=arguments).start()
            there.close()  # here: a process that ends without a word closes the pipe
            running.append(here)
    for pipe in running:
        pipe.recv()
    if options.pause:
        print("prepared", flush=True)
        sys.stdin.readline()
    for pipe in running:
        pipe.send("now")
        found = pipe.recv()
        content["results"].append(found)
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print("{model}, {size} x {length}".format(**found))
        for title, figures in found["ways"].items():
            print(line(title, figures), flush=True)
    return 0


if __name__ == "__main__":
    # Functions that another process is to find have the name of the module, not that of the program.
    from benchmarks.gpu import equal_memory

    raise SystemExit(equal_memory.main())
