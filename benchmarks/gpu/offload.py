"""What offload takes: share of the activations, time of a step, and the rate of its copies against the link's own.

python -m benchmarks.gpu.offload --output benchmarks/results/gpu_offload.json
python -m benchmarks.gpu.offload --small --output /tmp/small.json        (on the CPU, to disk)
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.gpu.cases import MODELS

from tightfit import TokenBatch, offload
from tightfit.devices.cuda_figures import link_rates
from tightfit.levers.micro_batch import as_parts
from tightfit.memory.allocator import measured_peak
from tightfit.step import forward_backward, model_loss

PATTERNS = ("layers.0", "layers.[0-1]", "layers.[0-3]", "layers.*")
WARM_UP, TIMED = 2, 7


def measure(*, small: bool) -> dict[str, Any]:
    """The plain step, and the step with more and more blocks offloaded, in turns."""
    device = torch.device("cpu" if small else "cuda")
    name, size, length = ("tiny", 4, 96) if small else ("8B-width", 1, 8192)
    torch.manual_seed(0)
    with device:
        model = MODELS[name].build()
    tensors = TokenBatch(size, length, MODELS[name].vocabulary).tensors()
    parts = as_parts([{key: tensor.to(device) for key, tensor in tensors.items()}], model_loss)

    def step() -> None:
        model.zero_grad()
        forward_backward(model, parts, model_loss, "bf16")

    resident = [*model.parameters(), *model.buffers(), *parts[0].batch.values()]
    step()
    plain = {"peak_bytes": measured_peak(step, resident), "step_seconds": seconds(step, device)}
    weights = sum(p.nbytes for p in model.parameters())
    rows = []
    for pattern in PATTERNS:
        with offload(model, pattern, smallest=1 if small else 1 << 20) as applied:
            found = {"pattern": pattern, "step_seconds": seconds(step, device)}
            found["peak_bytes"] = measured_peak(step, resident)
            found["offloaded_bytes"] = applied.statistics.high_water_bytes
            found["copy_bytes_per_second"] = None if small else copy_rate(step, found["offloaded_bytes"])
        found["plain_seconds"] = seconds(step, device)  # again, beside it
        found["share_of_activations"] = found["offloaded_bytes"] / (plain["peak_bytes"] - 2 * weights)
        rows.append(found)
        print(line(found), flush=True)
    return {"model": name, "plain": plain, "link": None if small else link_rates(), "results": rows}


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """The median of some steps."""
    found = []
    for number in range(WARM_UP + TIMED):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= WARM_UP:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def copy_rate(step: Callable[[], None], nbytes: int) -> float:
    """Bytes per second of the copies to and from pinned memory inside a step, by CUDA's own record of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spent = sum(e.device_time_total for e in profile.events() or () if "Memcpy" in e.name and "Pinned" in e.name)  # µs
    return 2 * nbytes / (spent * 1e-6)


def line(found: dict[str, Any]) -> str:
    """For the terminal."""
    rate = found["copy_bytes_per_second"]
    words = f", copies at {rate / 1e9:.1f} GB/s" if rate else ""
    return (
        f"{found['pattern']}: {found['share_of_activations']:.1%} of the activations, time "
        f"{found['step_seconds'] / found['plain_seconds'] - 1:+.1%}, peak {found['peak_bytes']:,}{words}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU, to disk")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --small runs it on the CPU")
    content = {"environment": environment(), **measure(small=options.small)}
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
