"""What the allocator's settings do for batches of changing length: reserved against allocated, one process a setting.

python -m benchmarks.gpu.fragmentation --output benchmarks/results/gpu_fragmentation.json
python -m benchmarks.gpu.fragmentation --small --output /tmp/small.json        (on the CPU, which reserves nothing)
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.gpu.cases import MODELS

from tightfit import TokenBatch, set_allocator
from tightfit.levers.micro_batch import as_parts
from tightfit.memory.counters import allocator_state
from tightfit.optim.by_name import build_optimizer
from tightfit.step import StepSettings, forward_backward, model_loss, update

DEFAULT = "default"
SETTINGS = (DEFAULT, "expandable_segments", "max_split_size_mb:128", "roundup_power2_divisions:8")
STEPS = 40


def ragged(count: int, longest: int) -> list[int]:
    """The same lengths for every setting, from an eighth of the longest up, in multiples of 8."""
    chosen = random.Random(0)
    return [8 * chosen.randint(longest // 64, longest // 8) for _ in range(count)]


def measure(setting: str, *, small: bool) -> dict[str, Any]:
    """Train in this process; what the allocator says at the end, and the median of seconds a step."""
    if setting != DEFAULT:
        set_allocator(setting)
    device = torch.device("cpu" if small else "cuda")
    name, size, longest, steps = ("tiny", 4, 96, 4) if small else ("1B", 4, 4096, STEPS)
    torch.manual_seed(0)
    with device:
        model = MODELS[name].build()
    optimizer = build_optimizer("adamw", model.parameters())
    seconds = []
    for length in ragged(steps, longest):
        tensors = TokenBatch(size, length, MODELS[name].vocabulary).tensors()
        parts = as_parts([{key: tensor.to(device) for key, tensor in tensors.items()}], model_loss)
        began = time.perf_counter()
        forward_backward(model, parts, model_loss, "bf16")
        update(model, optimizer, StepSettings("bf16"))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return {"setting": setting, "step_seconds": statistics.median(seconds), "allocator": allocator_state(device)}


def line(found: dict[str, Any]) -> str:
    """For the terminal."""
    state = found["allocator"]
    words = f"{found['setting']}: {found['step_seconds'] * 1e3:.1f} ms a step"
    if state is None:
        return f"{words}, no CUDA allocator"
    reserved, allocated = state["reserved_peak_bytes"], state["allocated_peak_bytes"]
    return f"{words}, allocated {allocated:,}, reserved {reserved:,} ({reserved / allocated - 1:+.1%})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--setting", help="measure this one in this process, and print the figures")
    options = parser.parse_args(arguments)
    if options.setting is not None:
        print(json.dumps(measure(options.setting, small=options.small)))
        return 0
    if options.output is None:
        parser.error("name a file with --output")
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --small runs it on the CPU")
    results = []
    for setting in SETTINGS:
        command = [sys.executable, "-m", "benchmarks.gpu.fragmentation", "--setting", setting]
        done = subprocess.run(command + ["--small"] * options.small, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(line(results[-1]), flush=True)
    content = {"environment": environment(), "results": results}
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
