"""Small steps, where launching operators takes as long as computing them: eager code, checkpoints, captured blocks.

A decoder of width 256 with 8 blocks in fp32. Five ways run the same step on copies of one model and take turns:
eager code, `torch.utils.checkpoint` and our recorder around every block, and captured blocks that keep everything (as
ATen calls, or compiled by PyTorch's compiler) or recompute everything. Seconds are of the processor, on one thread, so
that what other processes do in between is not in them. Gradients are compared bit by bit; the peak is the CPU
allocator's.

    python benchmarks/captured.py [--small] [--rounds 15] [--output results.json]
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightfit
from taking_turns import options_of, report, settle
from tightfit.levers.recompute import RECOMPUTE_ALL
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.step import TokenBatch

SHAPE = {"hidden_size": 256, "num_layers": 8, "num_heads": 8, "vocab_size": 6400}
BATCHES = ((1, 64), (1, 256), (4, 256), (8, 256))
TINY, TINY_BATCHES = {**SHAPE, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}, ((1, 16),)
WARM_UP = 2


def by_checkpoint(model: nn.Module) -> None:
    for layer in model.layers:
        layer.forward = checkpointed(layer.forward)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


CHECKPOINT = "torch checkpoint"
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: None,
    CHECKPOINT: by_checkpoint,
    "recompute": lambda model: tightfit.recompute(model, "layers.*"),
    "captured, keep all": lambda model: tightfit.capture(model, "layers.*"),
    "captured, keep all, compiled": lambda model: tightfit.capture(model, "layers.*", compiled=True),
    "captured, recompute all": lambda model: tightfit.capture(model, "layers.*", policy=RECOMPUTE_ALL),
}


def step(model: nn.Module, batch: dict[str, Any]) -> None:
    model(**batch).loss.backward()


def processor_seconds(model: nn.Module, batch: dict[str, Any], device: str) -> float:
    model.zero_grad(set_to_none=True)
    settle(device)
    start = time.perf_counter() if device == "cuda" else time.process_time()
    step(model, batch)
    settle(device)
    return (time.perf_counter() if device == "cuda" else time.process_time()) - start


def measure(shape: dict[str, Any], size: int, length: int, rounds: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**shape)).to(device).train()
    batch = {name: t.to(device) for name, t in TokenBatch(size, length, shape["vocab_size"]).tensors().items()}
    models = {name: copy.deepcopy(model) for name in WAYS}
    first: dict[str, float] = {}
    for name, apply in WAYS.items():
        apply(models[name])
        first[name] = processor_seconds(models[name], batch, device)
    gradients = {name: [p.grad.clone() for p in each.parameters()] for name, each in models.items()}
    peaks = {}
    for name, each in models.items():
        each.zero_grad(set_to_none=True)
        resident = [*each.parameters(), *each.buffers(), *batch.values()]
        peaks[name] = measured_peak(lambda each=each: step(each, batch), resident)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds + WARM_UP):
        for name in list(WAYS)[:: 1 if turn % 2 else -1]:
            taken = processor_seconds(models[name], batch, device)
            if turn >= WARM_UP:
                seconds[name].append(taken)
    return {
        name: {
            "seconds": statistics.median(own),
            "of_plain": statistics.median(a / b for a, b in zip(own, seconds["plain"], strict=True)),
            "of_checkpoint": statistics.median(a / b for a, b in zip(own, seconds[CHECKPOINT], strict=True)),
            "least_of_plain": min(own) / min(seconds["plain"]),
            "first_step_seconds": first[name],
            "peak_bytes": peaks[name],
            "bit_equal": all(map(torch.equal, gradients[name], gradients["plain"])),
        }
        for name, own in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__ or "", arguments, rounds=15)
    torch.set_num_threads(1)
    shape, batches = (TINY, TINY_BATCHES) if options.small else (SHAPE, BATCHES)
    cases = {
        f"{size} x {length}": measure(shape, size, length, options.rounds, options.device) for size, length in batches
    }
    report(options, {"shape": shape, "cases": cases})


if __name__ == "__main__":
    main()
