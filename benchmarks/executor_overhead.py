"""What the recompute executor itself costs per operator in eager mode.

The tensors are so small that kernels cost next to nothing: what is left is Python's and the dispatcher's own time.
Steps of all ways take turns, PyTorch's checkpoint and captured blocks among them; each figure is the least over the
repeats, since other processes can only make it larger (and a median would count the longer steps' preemptions as the
executor's).

    python benchmarks/executor_overhead.py [--output results.json]
"""

import argparse
import copy
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tightfit
from environment import environment
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, Policy
from tightfit.levers.recompute.lever import apply_policies
from tightfit.runtime.operators import traits_of

WIDTH, HEADS = 8, 2


class Block(nn.Module):
    """A decoder block's operators at a size where no kernel takes time."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Counted(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not traits_of(func).is_view
        return func(*args, **(kwargs or {}))


def operators_of(model: nn.Module, x: torch.Tensor) -> int:
    with Counted() as counted:
        model(x)
    return counted.count


def timed(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of one forward and of one backward."""
    start = time.perf_counter()
    loss = model(x).sum()
    middle = time.perf_counter()
    loss.backward()
    return middle - start, time.perf_counter() - middle


def measure(blocks: int, repeats: int) -> dict[str, dict[str, float]]:
    """Least microseconds of forward and backward, by what the executor does; and against plain per operator."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(blocks))), torch.randn(1, 4, WIDTH)
    operators = operators_of(model, x)
    models = {name: copy.deepcopy(model) for name in WAYS}
    for name, apply in WAYS.items():
        apply(models[name])
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for turn in range(repeats + 3):
        for name, each in models.items():
            sample = timed(each, x)
            if turn >= 3:  # the first steps fill caches, and capture
                samples[name].append(sample)
    plain = least_microseconds(samples["plain"])
    return {name: compare(least_microseconds(found), plain, operators) for name, found in samples.items()}


def by_checkpoint(model: nn.Sequential) -> None:
    for block in model:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def with_policy(policy: Policy, model: nn.Sequential) -> None:
    apply_policies(model, {str(i): policy for i in range(len(model))})


WAYS: dict[str, Callable[[nn.Sequential], Any]] = {
    "plain": lambda model: None,
    "kept": functools.partial(with_policy, KEEP_ALL),
    "recomputed": functools.partial(with_policy, RECOMPUTE_ALL),
    "torch checkpoint": by_checkpoint,
    "captured, kept": lambda model: tightfit.capture(model, "*"),
    "captured, recomputed": lambda model: tightfit.capture(model, "*", policy=RECOMPUTE_ALL),
}


def least_microseconds(samples: list[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*samples, strict=True)
    return min(forward) * 1e6, min(backward) * 1e6


def compare(times: tuple[float, float], plain: tuple[float, float], operators: int) -> dict[str, float]:
    return {
        "operators": operators,
        "forward_us": times[0],
        "backward_us": times[1],
        "step_ratio": sum(times) / sum(plain),
        "added_forward_us_per_operator": (times[0] - plain[0]) / operators,
        "added_backward_us_per_operator": (times[1] - plain[1]) / operators,
    }


def main(print_line: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)  # nothing here is worth a second thread
    text = json.dumps({"environment": environment(), "cases": measure(options.blocks, options.repeats)}, indent=2)
    if options.output is not None:
        options.output.write_text(text + "\n")
    print_line(text)


if __name__ == "__main__":
    main()
