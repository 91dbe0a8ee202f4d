"""Measures the seconds that PyTorch, the recompute executor and captured blocks add to each operator's kernel on a CPU.

All are Python and bookkeeping. They take the same time for small and large kernels, and timing a kernel alone does not
show them. So steps of a few small decoder blocks run here for real, in turns: plain steps, steps in which every kernel
is timed, steps with recomputed blocks, and steps with captured ones.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.levers.captured import capture_paths
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, Applied
from tightfit.levers.recompute.lever import apply_policies
from tightfit.runtime.activity import now
from tightfit.runtime.operators import traits_of

WIDTH, HEADS, TOKENS, BLOCKS = 64, 2, 64, 2
ROUNDS = 60
WARM_UP = 5


@dataclass(frozen=True)
class OwnTime:
    """Seconds for one operator that computes something: PyTorch's own (with the views around it), and those that the
    executor adds to record it and to replay it. `captured` are all of an operator in a captured block, with its share
    of entering the block.
    """

    framework: float
    recording: float
    replaying: float
    captured: float


class Block(nn.Module):
    """A decoder block."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class _Kernels(TorchDispatchMode):
    """Counts the operators that compute something, and times their kernels, for first runs and replays separately."""

    def __init__(self):
        super().__init__()
        self.counts, self.seconds = {False: 0, True: 0}, {False: 0.0, True: 0.0}  # by whether it is run again

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if traits_of(func).is_view:
            return func(*args, **(kwargs or {}))
        again = now.recomputing > 0
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds[again] += time.perf_counter() - began
        self.counts[again] += 1
        return out


class _Blocks:
    """A few decoder blocks, and steps that train them."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.x = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(1, TOKENS, WIDTH)

    def timed(self) -> tuple[float, float]:
        """Seconds of one forward and of one backward."""
        self.model.zero_grad()
        began = time.perf_counter()
        loss = self.model(self.x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        return middle - began, time.perf_counter() - middle

    def kernels(self) -> _Kernels:
        """The kernels of one forward and backward."""
        with _Kernels() as kernels:
            self.timed()
        return kernels

    def forward_operators(self) -> int:
        with _Kernels() as kernels:
            self.model(self.x)
        return kernels.counts[False]

    def recomputed(self) -> Applied:
        return apply_policies(self.model, {str(i): RECOMPUTE_ALL for i in range(BLOCKS)})

    def captured(self) -> Applied:
        return capture_paths(self.model, {str(i): KEEP_ALL for i in range(BLOCKS)})


def own_time(rounds: int = ROUNDS) -> OwnTime:
    """Measure with the present number of threads: the least times over interleaved rounds, at least zero.

    Does not use the user's random generators.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        blocks = _Blocks()
        plain, recomputed, captured, kernels, kernels_again = [], [], [], [], []
        for _ in range(WARM_UP + rounds):
            plain.append(blocks.timed())
            kernels.append(blocks.kernels())
            with blocks.recomputed():
                recomputed.append(blocks.timed())
                kernels_again.append(blocks.kernels())
            with blocks.captured():
                captured.append(blocks.timed())
        recorded = blocks.forward_operators()
    first, again = kernels[0].counts[False], kernels_again[0].counts[True]
    (forward, backward), (forward_recorded, backward_replayed) = _least(plain), _least(recomputed)
    spent_captured = sum(_least(captured))
    spent = min(k.seconds[False] for k in kernels)
    spent_again = min(k.seconds[True] for k in kernels_again)
    framework = max(0.0, (forward + backward - spent) / first)
    return OwnTime(
        framework,
        recording=max(0.0, (forward_recorded - forward) / recorded),
        replaying=max(0.0, (backward_replayed - backward - spent_again) / again - framework),
        captured=max(0.0, (spent_captured - spent) / first),
    )


def _least(times: list[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*times, strict=True)
    return min(forward), min(backward)
