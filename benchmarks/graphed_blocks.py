"""CUDA graphs of a model's blocks: what they would save of a step, and the memory that they take.

A graph launches its kernels together, so it saves nothing where the kernels take longer than their launches. The first
table says up to which batch the launches of a plain step take longer (the two clocks of `estimate`, by the rates of
cards in devices/known.toml), and how much of the card that step fills. The second runs PyTorch's own graphs of blocks
(`torch.cuda.make_graphed_callables`, which keep everything for backward) beside captured blocks on a null card, which
computes nothing: host's seconds are the processor's until the last launch, bytes the CUDA allocator's own. What a graph
writes is reserved in a pool of its own, and not counted as allocated.

    python -m tightfit.devices.nullcard rtx4090 --memory 80GiB --no-copies -- \
        python benchmarks/graphed_blocks.py --output benchmarks/results/graphed_blocks.json
"""

import argparse
import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tightfit
from environment import environment
from gpu.cases import MODELS
from taking_turns import settle, write
from tightfit.devices.known import find
from tightfit.levers.recompute import RECOMPUTE_ALL
from tightfit.step import TokenBatch, autocast
from tightfit.tracing.build import build_dry

CARDS = ("t4", "rtx3060", "rtx4090", "a100-80", "h100")
STEPS = {"MM26": 512, "GPT-2": 1024, "Llama": 1024}  # tokens of a sequence
MOST_ROWS = 64
GRAPHED, BLOCKS, ROWS, TOKENS = "MM26", "layers", 4, 512
WARM_UP, ROUNDS = 4, 15


def crossing(name: str, card: str) -> dict[str, Any]:
    """The largest batch, in powers of two, whose launches take longer than its kernels, and the step at that batch."""
    tokens, memory = STEPS[name], find(card).spec.memory_bytes
    dry, found = build_dry(MODELS[name].build), {}
    rows = 1
    while rows <= MOST_ROWS:
        batch = TokenBatch(rows, tokens, MODELS[name].vocabulary).tensors()
        precision = "fp16" if card == "t4" else "bf16"
        figures = tightfit.estimate(dry, batch, device=card, precision=precision).step_figures
        if figures.peak_bytes > memory:
            break
        found[rows] = {
            "launches_of_kernels": figures.host_seconds / figures.device_seconds,
            "of_memory": figures.peak_bytes / memory,
        }
        rows *= 2
    longer = [rows for rows, each in found.items() if each["launches_of_kernels"] > 1]
    return {"launches_longer_up_to": max(longer, default=0), "by_rows": found}


def graphed(model: nn.Module, step: Callable[[], None], precision: Any) -> None:
    """Each block as two CUDA graphs of PyTorch's own, with inputs like those of one step."""
    blocks, inputs = list(model.get_submodule(BLOCKS).children()), []

    def note(block: nn.Module, args: tuple) -> None:
        inputs.append([each.detach().clone().requires_grad_(each.requires_grad) for each in args if each is not None])

    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    step()
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    gc.collect()
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        torch.cuda.make_graphed_callables(tuple(blocks), tuple(map(tuple, inputs)), allow_unused_input=True)
    for block in blocks:
        block.forward = functools.partial(without_nones, block.forward)


def recomputed(model: nn.Module, step: Callable[[], None], precision: Any) -> Any:
    return tightfit.capture(model, f"{BLOCKS}.*", policy=RECOMPUTE_ALL)


def without_nones(forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*(each for each in args if each is not None))


WAYS: dict[str, Callable[[nn.Module, Callable[[], None], Any], Any]] = {
    "plain": lambda model, step, precision: None,
    "capture": lambda model, step, precision: tightfit.capture(model, f"{BLOCKS}.*"),
    "capture, recompute all": recomputed,
    "CUDA graphs": graphed,
}


def run(model: nn.Module, batch: dict[str, torch.Tensor], precision: Any) -> None:
    model.zero_grad(set_to_none=True)
    with autocast(precision, "cuda"):
        loss = model(**batch).loss
    loss.backward()


def measure(precision: Any) -> dict[str, Any]:
    """One way after the other: a pool that is reserved for graphs stays so."""
    with torch.device("cuda"):
        plain = MODELS[GRAPHED].build().train()
    batch = {name: each.cuda() for name, each in TokenBatch(ROWS, TOKENS, MODELS[GRAPHED].vocabulary).tensors().items()}
    found = {}
    for way, apply in WAYS.items():
        model = copy.deepcopy(plain)
        step = functools.partial(run, model, batch, precision)
        handle = apply(model, step, precision)
        for _ in range(WARM_UP):
            step()
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(ROUNDS):
            settle("cuda")
            start = time.process_time()
            step()
            settle("cuda")
            seconds.append(time.process_time() - start)
        found[way] = {"seconds": statistics.median(seconds), "reserved_bytes": torch.cuda.max_memory_reserved()}
        del model, step, handle
        gc.collect()
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device: run it on a null card")
    of_graphs = {
        "graphed": f"{GRAPHED} at {ROWS} x {TOKENS}",
        "graphs": {precision: measure(precision) for precision in ("fp32", "bf16")},
    }
    crossings = {name: {card: crossing(name, card) for card in CARDS} for name in STEPS}
    write({"environment": environment(), "tokens": STEPS, "crossings": crossings, **of_graphs}, options.output)


if __name__ == "__main__":
    main()
