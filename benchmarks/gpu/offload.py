"""What offload takes: share of the activations, time of a step, and the rate of its copies against the link's own.

Plans that may offload, at shares of the plain peak, then whole blocks by hand. Each row is written when it is there.

python -m benchmarks.gpu.offload --output benchmarks/results/gpu_offload.json
python -m benchmarks.gpu.offload --small --output /tmp/small.json        (on the CPU, to disk)
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.gpu.cases import MODELS

from tightfit import TokenBatch, offload, plan
from tightfit.devices.cuda_figures import link_rates
from tightfit.errors import CannotFit
from tightfit.levers.micro_batch import as_parts
from tightfit.memory.allocator import measured_peak
from tightfit.planner.levers import Offload
from tightfit.step import forward_backward, model_loss
from tightfit.tracing.build import build_dry

PATTERNS = ("layers.0", "layers.[0-1]", "layers.[0-3]", "layers.*")
SHARES = ("0.9x", "0.8x", "0.7x")  # of the plain peak, for plans
WARM_UP, TIMED = 2, 4


class Steps:
    """Forward and backward of a case, with what is measured of them."""

    def __init__(self, name: str, size: int, length: int, device: torch.device):
        torch.manual_seed(0)
        with device:
            self.model = MODELS[name].build()
        self.batch = TokenBatch(size, length, MODELS[name].vocabulary)
        tensors = {key: tensor.to(device) for key, tensor in self.batch.tensors().items()}
        self.parts, self.device = as_parts([tensors], model_loss), device
        self.resident = [*self.model.parameters(), *self.model.buffers(), *tensors.values()]
        self.run()
        weights = sum(p.nbytes for p in self.model.parameters())
        self.plain = {"peak_bytes": measured_peak(self.run, self.resident), "step_seconds": seconds(self.run, device)}
        self.activations = self.plain["peak_bytes"] - 2 * weights

    def run(self) -> None:
        self.model.zero_grad()
        forward_backward(self.model, self.parts, model_loss, "bf16")

    def row(self, lever: AbstractContextManager[Any], offloaded: Callable[[Any], int]) -> dict[str, Any]:
        """Seconds and peak with a lever, and the plain seconds beside it."""
        with lever as applied:
            found: dict[str, Any] = {"step_seconds": seconds(self.run, self.device)}
            found["peak_bytes"] = measured_peak(self.run, self.resident)
            found["offloaded_bytes"] = offloaded(applied)
            on_card = self.device.type == "cuda" and found["offloaded_bytes"]
            found["copy_bytes_per_second"] = copy_rate(self.run, found["offloaded_bytes"]) if on_card else None
        found["plain_seconds"] = seconds(self.run, self.device)
        found["share_of_activations"] = found["offloaded_bytes"] / self.activations
        found["added_time"] = found["step_seconds"] / found["plain_seconds"] - 1
        return found


def measured(*, small: bool) -> Iterator[dict[str, Any]]:
    """The content of the file, again after each row."""
    device = torch.device("cpu" if small else "cuda")
    name, size, length = ("tiny", 4, 96) if small else ("8B-width", 1, 8192)
    steps = Steps(name, size, length, device)
    content = {"model": name, "size": size, "length": length, "plain": steps.plain}
    content["link_bytes_per_second"] = None if small else link_rates()
    rows: list[dict[str, Any]] = []
    dry = build_dry(MODELS[name].build)
    for share in SHARES:
        how: dict[str, Any] = {"levers": ["offload"], "precision": "bf16", "device": device.type, "optimizer": "sgd"}
        try:
            made = plan(dry, steps.batch, share, **how)
        except CannotFit as error:
            rows.append({"pattern": f"plan at {share}", "error": str(error).splitlines()[0]})
        else:
            lever = made.lever(Offload)
            row = steps.row(made.apply(steps.model), lambda _, lever=lever: lever.bytes if lever is not None else 0)
            predicted = {"predicted_seconds": made.step_seconds, "predicted_bytes": made.peak_bytes}
            rows.append({"pattern": f"plan at {share}", **row, **predicted})
        yield {**content, "results": rows}
    for pattern in PATTERNS:
        lever = offload(steps.model, pattern, smallest=1 if small else 1 << 20)
        rows.append({"pattern": pattern, **steps.row(lever, lambda applied: applied.statistics.high_water_bytes)})
        yield {**content, "results": rows}


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
    if "error" in found:
        return f"{found['pattern']}: {found['error']}"
    rate = found["copy_bytes_per_second"]
    words = f", copies at {rate / 1e9:.1f} GB/s" if rate else ""
    return (
        f"{found['pattern']}: {found['share_of_activations']:.1%} of the activations, time {found['added_time']:+.1%}, "
        f"peak {found['peak_bytes']:,}{words}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU, to disk")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --small runs it on the CPU")
    where = environment()
    for content in measured(small=options.small):
        print(line(content["results"][-1]), flush=True)
        options.output.write_text(json.dumps({"environment": where, **content}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
