"""Models that do not fit, trained with their weights on the host: planned anywhere, then run on a card.

    python -m benchmarks.gpu.streamed --plan FOLDER --device h200          (no card is needed)
    python -m benchmarks.gpu.streamed --run FOLDER --output benchmarks/results/gpu_streamed.json

Each case is a process. First it takes steps by repeatable kernels, whose losses and trained weights are compared with
those of the same training with all weights on the card. Then its allocator is bounded as that of a card of the budget
and half a GiB more, and bytes and seconds are measured. With `--pause` that begins when a line comes from the standard
input; cases of `--together` are built side by side before.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.gpu.measuring import decisions, fresh_device
from torch import nn

from tightfit import Plan, TokenBatch, estimate, plan
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.memory.counters import highest_rss
from tightfit.models.adapters import add_adapter
from tightfit.models.pretrained import build_pretrained
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.levers import Stream
from tightfit.step import StepSettings, forward_backward, model_loss, update
from tightfit.tracing.build import build_dry
from tightfit.training.config.schema import AdapterConfig, PretrainedModel
from tightfit.training.loop import resident_tensors
from tightfit.units import parse_bytes

BESIDE = 512 << 20  # bytes that the allocator may reserve beyond the budget
REPEATED, WARM_UP, TIMED = 3, 2, 3  # steps
SEGMENTS = "expandable_segments:True"  # what users of full cards set


@dataclass(frozen=True)
class Case:
    """`budget` None: the plain step, with nothing on the host."""

    model: str
    work: str  # "adapters", or "all weights"
    size: int
    length: int
    levers: tuple[str, ...]
    budget: str | None = None

    @property
    def name(self) -> str:
        held = "plain" if self.budget is None else f"{self.budget} {' '.join(self.levers)}"
        return f"{self.model} {self.work} {self.size}x{self.length} {held}"

    @property
    def training(self) -> str:
        """What cases that compute the same share."""
        return f"{self.model} {self.work} {self.size}x{self.length}"

    @property
    def optimizer(self) -> str:
        return "adamw" if self.work == "adapters" else "offloaded_adamw"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = build_pretrained(PretrainedModel(path=self.model, random_init=True), torch.bfloat16)
        if self.work != "adapters":
            return model
        model = add_adapter(model, AdapterConfig(r=16, alpha=32.0, base="bf16"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero at first, and then half of the adapters have no gradient
                    parameter.normal_(std=0.01)
        return model

    def batch(self, model: nn.Module) -> TokenBatch:
        return TokenBatch(self.size, self.length, model.get_input_embeddings().num_embeddings)  # pyright: ignore


EXACT, CHUNKED = ("exact", "stream"), ("exact", "chunked_loss", "stream")
CASES = (
    Case("llama-3.1-8b", "adapters", 1, 2048, EXACT),
    *(Case("llama-3.1-8b", "adapters", 1, 2048, EXACT, budget) for budget in ("23GiB", "15GiB", "11GiB", "7GiB")),
    *(Case("llama-3.1-8b", "adapters", 8, 1024, CHUNKED, budget) for budget in ("23GiB", "7GiB")),
    *(Case("llama-3.2-3b", "all weights", 8, 1024, CHUNKED, budget) for budget in ("23GiB", "7GiB")),
)
SMALL = (
    Case("smollm2-135m", "adapters", 1, 64, EXACT),
    Case("smollm2-135m", "adapters", 1, 64, EXACT, "300MiB"),
    Case("smollm2-135m", "all weights", 1, 64, CHUNKED, "300MiB"),
)


def planned(case: Case, device: str, folder: Path) -> None:
    """Write the plan of a case, or the estimate of its plain step."""
    began = time.perf_counter()
    model = build_dry(case.build)
    how: dict[str, Any] = {"optimizer": case.optimizer, "precision": "bf16", "device": device}
    if case.budget is None:
        found = estimate(model, case.batch(model), **how)
        step, written = found.step_figures, None
        host = found.host_peak_bytes
    else:
        made = plan(model, case.batch(model), case.budget, levers=list(case.levers), **how)
        step, written, host = made.planned, made.to_dict(), made.host_peak_bytes
    figures = {
        "device": device,
        "peak_bytes": step.peak_bytes,
        "reserved_bytes": step.reserved_bytes,
        "step_seconds": step.step_seconds,
        "host_peak_bytes": host,
        "planning_seconds": time.perf_counter() - began,
        "environment": environment(),
    }
    file = folder / f"{case.name.replace(' ', '_')}.json"
    file.write_text(json.dumps({"case": asdict(case), "predicted": figures, "plan": written}) + "\n", "utf-8")
    print(case.name, {k: v for k, v in figures.items() if k != "environment"}, flush=True)


def run(case: Case, written: Mapping[str, Any], parent: Connection) -> None:
    """In a process of the case: build it, say so, and measure when told."""
    try:
        parent.send({"measured": measure(case, written, parent)})
    except Exception as error:
        parent.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def measure(case: Case, written: Mapping[str, Any], parent: Connection) -> dict[str, Any]:
    device = torch.device("cuda")
    began = time.perf_counter()
    with device:
        model = case.build()
    made = None if written["plan"] is None else Plan.from_dict(written["plan"])

    def levers() -> AbstractContextManager[Any]:
        return nullcontext() if made is None else made.apply(model)

    shape = case.batch(model)
    batch = {name: tensor.to(device) for name, tensor in shape.tensors().items()}
    parts = as_parts(split_batch(batch, 1 if made is None else made.micro_batches), model_loss)
    losses: list[float] = []

    def step() -> None:
        losses.append(float(forward_backward(model, parts, model_loss, "bf16")))
        update(model, optimizer, StepSettings("bf16"))

    with levers(), decisions():
        optimizer = build_optimizer(case.optimizer, [p for p in model.parameters() if p.requires_grad])
        with repeatable():
            for _ in range(REPEATED):
                step()
        trained = checksum(model)
        built = time.perf_counter() - began
        torch.cuda.empty_cache()  # other cases are built meanwhile
        parent.send("prepared")
        parent.recv()
    with levers(), decisions():  # anew: repeatable kernels are other operators than planned, and blocks had met those
        fresh_device(device)
        if case.budget is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction((parse_bytes(case.budget) + BESIDE) / total)
        for _ in range(WARM_UP):
            step()
        peak = measured_peak(step, resident_tensors(model, optimizer, batch))
        seconds = [timed(step, device) for _ in range(TIMED)]
        reserved, host = torch.cuda.max_memory_reserved(device), highest_rss()
        torch.cuda.set_per_process_memory_fraction(1.0)  # the weights come back
    streams = None if made is None else made.lever(Stream)
    return {
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "host_peak_bytes": host,
        "step_seconds": statistics.median(seconds),
        "building_seconds": built,
        "streamed_blocks": 0 if streams is None else len(streams.paths),
        "losses": losses[:REPEATED],
        "trained": trained,
    }


@contextmanager
def repeatable() -> Iterator[None]:
    """Kernels that give the same bits each time, and their memory as it is."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def timed(step: Any, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def checksum(model: nn.Module) -> int:
    """Of the bits of all trained weights, in their order."""
    found = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            bits = parameter.detach().reshape(-1).cuda().view(torch.int16).long()
            weights = torch.arange(bits.numel(), device=bits.device) % 65521 + 1
            found = (found * 31 + int((bits * weights).sum())) % 2**61
    return found


class Running:
    """A case in a process of its own."""

    def __init__(self, case: Case, written: Mapping[str, Any]):
        self.row: dict[str, Any] = {"name": case.name, **asdict(case), "predicted": written["predicted"]}
        self.training = case.training
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=run, args=(case, written, theirs))
        self._process.start()
        theirs.close()  # here: a process that ends without a word closes the pipe

    def hear(self) -> None:
        try:
            said = self._pipe.recv()
            self.row |= said if isinstance(said, dict) else {}
        except EOFError:
            self._process.join()
            self.row["error"] = f"the process ended with exit code {self._process.exitcode}"

    def measured(self) -> None:
        if "error" not in self.row:
            self._pipe.send("now")
            self.hear()
        self._process.join()


def compared(rows: Sequence[dict[str, Any]], trainings: Sequence[str]) -> None:
    """Note in each row whether its losses and weights are those of the first one of the same training."""
    first: dict[str, dict[str, Any]] = {}
    for row, training in zip(rows, trainings, strict=True):
        if "measured" in row:
            mine, whole = row["measured"], first.setdefault(training, row["measured"])
            row["equal"] = mine["losses"] == whole["losses"] and mine["trained"] == whole["trained"]


def line(row: Mapping[str, Any]) -> str:
    """For the terminal."""
    if "measured" not in row:
        return f"{row['name']}: FAILED {row['error']}"
    predicted, mine = row["predicted"], row["measured"]
    shares = ", ".join(
        f"{figure} {mine[figure]:,} ({predicted[figure] / mine[figure] - 1:+.3%})"
        for figure in ("peak_bytes", "reserved_bytes", "host_peak_bytes")
        if predicted[figure] and mine[figure]
    )
    seconds = f"{mine['step_seconds']:.3f} s ({predicted['step_seconds'] / mine['step_seconds'] - 1:+.1%})"
    equal = "" if "equal" not in row else ", bits equal" if row["equal"] else ", BITS DIFFER"
    return f"{row['name']}: {shares}, {seconds}, {mine['streamed_blocks']} blocks streamed{equal}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, metavar="FOLDER", help="write plans")
    parser.add_argument("--device", default="h200", help="of the plans (default: h200)")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="run plans")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name holds one of these texts")
    parser.add_argument("--pause", action="store_true", help="measure when a line comes from the standard input")
    parser.add_argument("--together", type=int, default=1, help="cases that are built at a time (default: 1)")
    options = parser.parse_args(arguments)
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = SEGMENTS
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    everything = SMALL if options.small else CASES
    cases = [case for case in everything if any(text in case.name for text in options.only)]
    if options.plan is not None:
        options.plan.mkdir(parents=True, exist_ok=True)
        for case in cases:
            planned(case, options.device, options.plan)
        return 0
    if options.run is None or options.output is None:
        parser.error("--plan FOLDER writes plans; --run FOLDER --output FILE runs them")
    content: dict[str, Any] = {"environment": environment(), "results": []}
    trainings: list[str] = []
    for first in range(0, len(cases), options.together):
        group = cases[first : first + options.together]
        files = [options.run / f"{case.name.replace(' ', '_')}.json" for case in group]
        written = [json.loads(file.read_text("utf-8")) for file in files]
        running = [Running(case, each) for case, each in zip(group, written, strict=True)]
        for each in running:
            each.hear()  # that it is built
        if options.pause:
            print("prepared", flush=True)
            sys.stdin.readline()
        for each in running:
            each.measured()
            content["results"].append(each.row)
            trainings.append(each.training)
            compared(content["results"], trainings)
            options.output.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            print(line(each.row), flush=True)
    return 0


if __name__ == "__main__":
    # Functions that another process is to find have the name of the module, not that of the program.
    from benchmarks.gpu import streamed

    raise SystemExit(streamed.main())
