"""Measures the host's seconds that PyTorch, the recompute executor and captured blocks take for each operator.

All are Python and bookkeeping. They take the same time for small and large kernels, and timing a kernel alone does not
show them. So steps of a few small decoder blocks run here for real, in turns: plain steps, steps in which every kernel
is timed, steps with recomputed blocks, and steps with captured ones. On a card, kernels run beside the host, and these
are so small that the host is never waited for: all that the host takes, launches among it, is its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.levers.activity import activity
from tightfit.levers.captured import capture_paths
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, Policy
from tightfit.levers.recompute.generators import default_generator
from tightfit.levers.recompute.lever import apply_policies
from tightfit.runtime.operators import traits_of

WIDTH, HEADS, TOKENS, BLOCKS = 64, 2, 64, 2
ROUNDS = 60
WARM_UP = 5


@dataclass(frozen=True)
class OwnTime:
    """Seconds for one operator that computes something: PyTorch's own (with the views and modules around it, and the
    launch on a card), and those that the executor adds to record it and to replay it. `captured` are all of an operator
    in a captured block, with its share of entering the block.
    """

    framework: float
    recording: float
    replaying: float
    captured: float


class TimedBlock(nn.Module):
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


class _Norm(nn.Module):
    """A root mean square norm, operator by operator, as models write it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class _ModelBlock(TimedBlock):
    """A decoder block of as many small operators, views and modules as in models: its norms, and rotated positions."""

    angles: torch.Tensor

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = _Norm(WIDTH), _Norm(WIDTH)
        self.register_buffer("angles", torch.arange(TOKENS)[:, None] / torch.arange(1, 1 + WIDTH // HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.parts(x))
        cosine, sine = self.angles.cos(), self.angles.sin()
        q, k = (each * cosine + self.rotated(each) * sine for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, -1))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(self.before_attention(x)).chunk(3, dim=-1)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)


class _Kernels(TorchDispatchMode):
    """Counts the operators that compute something, and times their kernels, for first runs and replays separately."""

    def __init__(self):
        super().__init__()
        self.counts, self.seconds = {False: 0, True: 0}, {False: 0.0, True: 0.0}  # by whether it is run again

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if traits_of(func).is_view:
            return func(*args, **(kwargs or {}))
        again = activity.recomputing > 0
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds[again] += time.perf_counter() - began
        self.counts[again] += 1
        return out


class _Blocks:
    """A few decoder blocks, and steps that train them, by eager code or under a lever on each block."""

    def __init__(self, kind: str = "cpu", lever: Callable[[nn.Module, dict[str, Policy]], object] | None = None):
        default_generator(torch.device(kind)).manual_seed(0)
        with torch.device(kind):
            self.model, self.x = nn.Sequential(*(_ModelBlock() for _ in range(BLOCKS))), torch.randn(1, TOKENS, WIDTH)
        self.lever = lever
        if lever is not None:
            policy = KEEP_ALL if lever is capture_paths else RECOMPUTE_ALL
            self.applied = lever(self.model, {str(i): policy for i in range(BLOCKS)})  # what it learns is learnt once

    def timed(self) -> tuple[float, float]:
        """The host's seconds of one forward and of one backward."""
        self.model.zero_grad()
        if self.x.is_cuda:
            torch.cuda.synchronize()
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


def own_time(kind: str = "cpu", rounds: int = ROUNDS) -> OwnTime:
    """Measure with the present number of threads: the least times over interleaved rounds, at least zero.

    Does not use the user's random generators.
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if kind == "cuda" else []), torch.enable_grad():
        blocks, recorded, programs = _Blocks(kind), _Blocks(kind, apply_policies), _Blocks(kind, capture_paths)
        plain, recomputed, captured, kernels, kernels_again = [], [], [], [], []
        for _ in range(WARM_UP + rounds):
            plain.append(blocks.timed())
            kernels.append(blocks.kernels())
            recomputed.append(recorded.timed())
            kernels_again.append(recorded.kernels())
            captured.append(programs.timed())
        in_forward = blocks.forward_operators()
    first, again = kernels[0].counts[False], kernels_again[0].counts[True]
    (forward, backward), (forward_recorded, backward_replayed) = _least(plain), _least(recomputed)
    spent_captured = sum(_least(captured))
    spent = spent_again = 0.0
    if kind == "cpu":
        spent = min(k.seconds[False] for k in kernels)
        spent_again = min(k.seconds[True] for k in kernels_again)
    framework = max(0.0, (forward + backward - spent) / first)
    return OwnTime(
        framework,
        recording=max(0.0, (forward_recorded - forward) / in_forward),
        replaying=max(0.0, (backward_replayed - backward - spent_again) / again - framework),
        captured=max(0.0, (spent_captured - spent) / first),
    )


def _least(times: list[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*times, strict=True)
    return min(forward), min(backward)
