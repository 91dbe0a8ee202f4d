"""What a step takes of the host on CUDA's path: the processor's time until the last kernel is launched.

On a null card, which computes and copies nothing, a step's time is the host's alone. Each way to run the same step has
its own copy of one model, and the ways take turns in one process: eager code, PyTorch's checkpoint of every block,
recompute of every block (and by the recorder alone), an exact plan for a long training, offload of every block,
captured blocks, and the loss in chunks. Seconds are the processor's, of all threads, since backward runs in a thread of
its own: what other processes do meanwhile is not in them. Each figure is the median of the ratios to eager code within
one round. Peaks are the CUDA allocator's own.

    python -m tightfit.devices.nullcard rtx4090 --memory 80GiB --no-copies -- \
        python benchmarks/host_time.py [--rounds 15]
"""

import argparse
import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightfit
from environment import environment
from gpu.cases import MODELS
from taking_turns import settle, write
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.recompute import RECOMPUTE_ALL
from tightfit.memory.allocator import measured_peak
from tightfit.step import TokenBatch, autocast
from tightfit.tracing.build import build_dry

PLAIN, CHECKPOINT, PLAN = "plain", "torch checkpoint", "plan"
WARM_UP = 4  # steps of each way: caches fill, functions and runs are learnt, blocks are captured
# Of the models in gpu/cases.py: the path of the blocks and of the head, rows and tokens of a batch.
CASES = {
    "GPT-2": ("transformer.h.*", "lm_head", 8, 1024),
    "Llama": ("model.layers.*", "lm_head", 8, 1024),
    "MM26": ("layers.*", "head", 32, 512),
    "tiny": ("layers.*", "head", 4, 64),
}
BUDGET = "0.65x"
STEPS = 100_000  # of the training that is planned for


def checkpointed(model: nn.Module, blocks: str) -> None:
    for block in model.get_submodule(blocks.removesuffix(".*")).children():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


WAYS: dict[str, Callable[[nn.Module, str, str], Any]] = {
    PLAIN: lambda model, blocks, head: None,
    CHECKPOINT: lambda model, blocks, head: checkpointed(model, blocks),
    "recompute": lambda model, blocks, head: tightfit.recompute(model, blocks),
    "recompute, recorded": lambda model, blocks, head: tightfit.recompute(model, blocks, captured=False),
    "offload": lambda model, blocks, head: tightfit.offload(model, blocks),
    "capture": lambda model, blocks, head: tightfit.capture(model, blocks),
    "capture, recompute all": lambda model, blocks, head: tightfit.capture(model, blocks, policy=RECOMPUTE_ALL),
    "chunked loss": lambda model, blocks, head: apply_chunked_loss(model, head),
}


def step(model: nn.Module, batch: dict[str, Any], precision: Any, device: str) -> None:
    model.zero_grad(set_to_none=True)
    with autocast(precision, device):
        loss = model(**batch).loss
    loss.backward()


def host_seconds(side: Callable[[], None], device: str) -> float:
    settle(device)
    start = time.process_time()
    side()
    settle(device)
    return time.process_time() - start


def planned(name: str, precision: Any, device: str) -> tightfit.Plan:
    """An exact plan for the model's step, made on a copy without memory."""
    _, _, rows, tokens = CASES[name]
    batch = TokenBatch(rows, tokens, MODELS[name].vocabulary)
    return tightfit.plan(build_dry(MODELS[name].build), batch, BUDGET, precision=precision, device=device, steps=STEPS)


def measure(name: str, precision: Any, rounds: int, device: str, only: Sequence[str]) -> dict[str, Any]:
    blocks, head, rows, tokens = CASES[name]
    with torch.device(device):
        model = MODELS[name].build().train()
    batch = {k: t.to(device) for k, t in TokenBatch(rows, tokens, MODELS[name].vocabulary).tensors().items()}
    ways = {way: apply for way, apply in WAYS.items() if not only or way in (*only, PLAIN, CHECKPOINT)}
    models = {way: copy.deepcopy(model) for way in ways}
    handles = [apply(models[way], blocks, head) for way, apply in ways.items()]  # held: a plan in force
    figures: dict[str, Any] = {}
    if not only or PLAN in only:
        plan = planned(name, precision, device)
        models[PLAN] = copy.deepcopy(model)
        handles.append(plan.apply(models[PLAN]))
        figures["levers"] = [type(lever).__name__ for lever in plan.levers]
    sides = {way: functools.partial(step, each, batch, precision, device) for way, each in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in sides}
    for turn in range(rounds + WARM_UP):
        for way in list(sides)[:: 1 if turn % 2 else -1]:
            taken = host_seconds(sides[way], device)
            if turn >= WARM_UP:
                seconds[way].append(taken)
    del handles
    return {
        way: {
            "seconds": statistics.median(own),
            "of_plain": statistics.median(a / b for a, b in zip(own, seconds[PLAIN], strict=True)),
            "of_checkpoint": statistics.median(a / b for a, b in zip(own, seconds[CHECKPOINT], strict=True)),
            "least_of_plain": min(own) / min(seconds[PLAIN]),
            "peak_bytes": peak_of(models[way], sides[way], batch),
        }
        for way, own in seconds.items()
    } | figures


def peak_of(model: nn.Module, side: Callable[[], None], batch: dict[str, torch.Tensor]) -> int:
    model.zero_grad(set_to_none=True)
    gc.collect()
    return measured_peak(side, [*model.parameters(), *model.buffers(), *batch.values()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, PLAN), default=[], help="beside plain and checkpoint")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device: run it on a null card")
    cases = {
        f"{name}, {precision}": measure(name, precision, options.rounds, options.device, options.ways)
        for name in options.models
        for precision in options.precisions
    }
    write({"environment": environment(), "rounds": options.rounds, "budget": BUDGET, "cases": cases}, options.output)


if __name__ == "__main__":
    main()
