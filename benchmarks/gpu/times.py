"""Where the time of a step goes on the GPU: seconds by operator, the power drawn, and the steady rate of products.

python -m benchmarks.gpu.times --output benchmarks/results/gpu_times.json
"""

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.gpu.cases import MODELS, OPTIMIZERS, Case
from benchmarks.gpu.measuring import fresh_device
from torch import nn

from tightfit import TokenBatch
from tightfit.levers.micro_batch import as_parts
from tightfit.optim.by_name import build_optimizer
from tightfit.step import StepSettings, forward_backward, model_loss, update

CASES = (
    Case("MM26", 32, 512),
    Case("MM26 dropout", 32, 512),
    Case("1B", 4, 4096),
    Case("1B", 1, 4096, precision="fp32"),
    Case("8B-width", 1, 8192, optimizer="adamw fused", grad_clip=1.0),
    Case("8B-width", 1, 8192),
    *(Case(model, 8, 1024) for model in ("GPT-2", "GPT-2 eager", "Gemma-2", "Gemma-3", "Llama")),
)
# Rows, columns, inner; the numbers decide how much power the product draws, and so its clock.
PRODUCTS = (
    *((8192, 8192, 8192, torch.bfloat16, fill) for fill in ("zero", "uniform", "normal")),
    (8192, 14336, 4096, torch.bfloat16, "normal"),
    (16384, 2048, 2048, torch.bfloat16, "normal"),
    (16384, 512, 512, torch.bfloat16, "normal"),
    (4096, 8192, 2048, torch.float32, "normal"),
)
SPAN = 2e13  # floating-point operations under one reading of the clock
STEADY = 1.2  # seconds of a product without a pause
WARM_UP, TIMED, LARGEST = 3, 9, 25


def product(rows: int, columns: int, inner: int, dtype: torch.dtype, fill: str) -> dict[str, Any]:
    """TFLOP/s when it begins, at best, and after half of the time."""
    sides = [torch.zeros(shape, dtype=dtype, device="cuda") for shape in ((rows, inner), (inner, columns))]
    for side in sides:
        if fill != "zero":
            side.normal_() if fill == "normal" else side.uniform_()
    operations = 2 * rows * columns * inner
    repeats = max(1, round(SPAN / operations))
    torch.mm(*sides)
    rates, drawn, began = [], None, time.perf_counter()
    while time.perf_counter() - began < STEADY:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            torch.mm(*sides)
        end.record()
        drawn = drawn or power()
        end.synchronize()
        rates.append(operations * repeats / max(start.elapsed_time(end), 1e-6) * 1e3 / 1e12)
    return {
        "m": rows,
        "n": columns,
        "k": inner,
        "dtype": str(dtype),
        "fill": fill,
        "tflops_first": rates[0],
        "tflops_best": max(rates),
        "tflops_last": statistics.median(rates[len(rates) // 2 :]),
        "power": drawn,
    }


def power() -> str | None:
    """Power, clocks and temperature as NVIDIA's tool says them, where it is."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = "--query-gpu=power.draw,clocks.sm,clocks.mem,temperature.gpu"
    command = ["nvidia-smi", asked, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def step_times(case: Case) -> dict[str, Any]:
    """Seconds of whole steps, until their last launch and until the card has finished, and of their operators."""
    fresh_device(torch.device("cuda"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = MODELS[case.model].build()
    batch = TokenBatch(case.size, case.length, MODELS[case.model].vocabulary).tensors()
    parts = as_parts([{name: tensor.cuda() for name, tensor in batch.items()}], model_loss)
    optimizer = build_optimizer(OPTIMIZERS[case.optimizer], model.parameters())

    def step() -> None:
        forward_backward(model, parts, model_loss, case.precision)
        update(model, optimizer, StepSettings(case.precision, case.grad_clip))

    launched, whole = [], []
    for _ in range(WARM_UP + TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        launched.append(time.perf_counter() - began)
        drawn = power() if len(launched) == WARM_UP else None
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        torch.cuda.synchronize()
    return {
        "case": case.name,
        "tokens": case.size * case.length,
        "linear_weights": sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
        "launched_seconds": statistics.median(launched[WARM_UP:]),
        "step_seconds": statistics.median(whole[WARM_UP:]),
        "power": drawn,
        "ops": sorted(_operators(profile), key=lambda row: -row[2])[:LARGEST],
    }


def _operators(profile: torch.profiler.profile) -> Iterator[tuple[str, int, float]]:
    """Name, calls, microseconds of the card."""
    for row in profile.key_averages():
        if row.key.startswith("aten::") and row.self_device_time_total > 0:
            yield row.key, row.count, row.self_device_time_total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    content: dict[str, Any] = {"environment": environment(), "products": [product(*each) for each in PRODUCTS]}
    content["steps"] = []
    for case in CASES:
        if options.only in case.name:
            content["steps"].append(step_times(case))
            options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            found = content["steps"][-1]
            print(
                f"{case.name}: {found['step_seconds'] * 1e3:.1f} ms, launched in {found['launched_seconds'] * 1e3:.1f}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
