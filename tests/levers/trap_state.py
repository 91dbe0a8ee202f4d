"""Blocks whose forward does more than compute: it draws random numbers, moves buffers, leaves things behind."""

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from trap_cases import WIDTH, Stack, side_loss, trap


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.second(F.silu(self.first(self.norm(x))))


trap("a plain MLP")(Mlp)


@trap("a side output left on the module", loss=side_loss)
class SideOutput(Mlp):
    def forward(self, x):
        hidden = F.silu(self.first(self.norm(x)))
        self.aux = hidden.softmax(-1).mean((0, 1)).square().sum()
        return x + self.second(hidden)


@trap("a side output that is the block's own intermediate", loss=lambda m, x: side_sum(m, x))
class SideIntermediate(Mlp):
    def forward(self, x):
        self.kept = (x * 2).tanh()
        out = self.second(F.silu(self.first(self.kept)))
        return out.tanh()


def side_sum(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().sum() + sum(layer.kept.pow(3).sum() for layer in model.layers)


@trap("batch normalisation")
class BatchNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + F.gelu(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))


@trap("instance normalisation with running statistics")
class InstanceNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def forward(self, x):
        return x + F.silu(self.norm(x.transpose(1, 2)).transpose(1, 2))


@trap("a counter that scales the result")
class Counter(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        self.calls += 1
        self.scale.mul_(1.5)
        return x + self.second(F.silu(self.first(x) * self.scale / self.calls))


@trap("a moving average updated and read")
class MovingAverage(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(2 * WIDTH))

    def forward(self, x):
        hidden = self.first(x)
        before = hidden - self.average
        with torch.no_grad():
            self.average.lerp_(hidden.mean((0, 1)), 0.3)
        return x + self.second((hidden - self.average).tanh() * before.sigmoid())


@trap("a moving average replaced by a new tensor")
class ReplacedAverage(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(2 * WIDTH))

    def forward(self, x):
        hidden = self.first(x)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean((0, 1))
        return x + self.second((hidden - self.average).tanh())


@trap("a moving average of all buffers at once")
class ForeachAverage(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.ones(2 * WIDTH))
        self.register_buffer("two", torch.ones(2 * WIDTH))

    def forward(self, x):
        hidden = self.first(x) + self.one
        seen = hidden.detach().mean((0, 1))
        torch._foreach_lerp_([self.one, self.two], [seen, seen * 2], 0.5)
        return x + self.second((hidden + self.two).tanh())


@trap("a user's own generator")
class OwnGenerator(Mlp):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator)
        jitter = torch.empty_like(x).normal_(generator=self.generator)
        return x + self.second(F.silu(self.first(x * noise + jitter)))


@trap("numbers from Python's random")
class PythonRandom(Mlp):
    def forward(self, x):
        if random.random() < 0.5:
            x = x.tanh()
        return x + random.random() * self.second(F.silu(self.first(x * random.random())))


@trap("numbers from numpy")
class NumpyRandom(Mlp):
    def forward(self, x):
        noise = torch.from_numpy(numpy.random.standard_normal(x.shape).astype("float32"))
        return x + self.second((self.first(x * noise) * float(numpy.random.rand())).tanh())


@trap("a seed set inside the block")
class Reseeded(Mlp):
    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(int(x.detach().abs().sum()) % 97)
            x = F.dropout(x, 0.4)
        return x + self.second(F.dropout(F.silu(self.first(x)), 0.3))


@trap("RReLU last")
class RReluLast(Mlp):
    def forward(self, x):
        return F.rrelu(self.second(F.silu(self.first(x))), training=True)


@trap("RReLU in the middle")
class RReluMiddle(Mlp):
    def forward(self, x):
        return x + self.second(F.rrelu(self.first(x), 0.1, 0.9, training=True).tanh())


@trap("RReLU in place")
class RReluInPlace(Mlp):
    def forward(self, x):
        return x + self.second(F.rrelu(self.first(x), 0.1, 0.9, training=True, inplace=True).tanh())


@trap("dropout")
class Dropout(Mlp):
    probability = 0.3

    def forward(self, x):
        hidden = F.dropout(F.silu(self.first(F.dropout(x, self.probability))), self.probability, inplace=True)
        return x + F.dropout(self.second(hidden), self.probability)


@trap("dropout that drops nothing")
class NoDropout(Dropout):
    probability = 0.0


@trap("dropout that drops everything")
class AllDropout(Dropout):
    probability = 1.0


@trap("alpha and feature dropout")
class OtherDropouts(Mlp):
    def forward(self, x):
        hidden = F.alpha_dropout(F.selu(self.first(x)), 0.2, training=True)
        return x + F.dropout1d(self.second(hidden), 0.3)


@trap("every kind of random draw")
class ManyDraws(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        order = torch.randperm(hidden.shape[1])
        gumbel = -torch.empty_like(hidden).exponential_().log()
        picked = torch.multinomial(hidden.detach().softmax(-1).flatten(0, 1), 1).view(*x.shape[:2], 1)
        mask = torch.bernoulli(torch.full_like(hidden, 0.7))
        hidden = (hidden + 0.1 * gumbel).softmax(-1)[:, order] * mask * torch.randint(1, 4, hidden.shape)
        return x + self.second(hidden.scatter_add(-1, picked, torch.randn(picked.shape)))


@trap("a cache that the block appends to")
class AppendedCache(Mlp):
    def __init__(self):
        super().__init__()
        self.cache: list[torch.Tensor] = []
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for part in x.chunk(2, dim=1):
            self.cache.append(self.query(part))
        past = torch.cat(self.cache, dim=1)
        return x + (self.query(x) @ past.transpose(1, 2)).softmax(-1) @ past


@trap("a cache written in place")
class BufferCache(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 6, WIDTH))
        self.filled = 0

    def forward(self, x):
        for part in x.chunk(2, dim=1):
            self.cache[:, self.filled : self.filled + 3] = part.detach().tanh()
            self.filled += 3
            x = x + torch.cat([part, part], dim=1) * self.cache.mean(1, keepdim=True)
        return x + self.second(F.silu(self.first(self.cache * x)))


def spectral(kind: Any) -> Any:
    def build() -> nn.Module:
        block = Mlp()
        kind(block.first)
        kind(block.second)
        return block

    return build


trap("spectral norm as a parametrisation")(spectral(nn.utils.parametrizations.spectral_norm))
trap("spectral norm as a hook")(spectral(nn.utils.spectral_norm))
trap("weight norm")(spectral(nn.utils.parametrizations.weight_norm))


@trap("frozen weights with adapters")
class Adapted(Mlp):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, 2 * WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.second(F.silu(self.first(y) + self.up(F.dropout(self.down(y), 0.1))))


def freeze_stem(model: Stack) -> None:
    model.stem.requires_grad_(False)


trap("adapters above a frozen stem", prepare=freeze_stem)(Adapted)


@trap("the input remembered for the next block", prepare=lambda model: chain_blocks(model))
class ReadsTheLast(Mlp):
    def forward(self, x):
        self.seen = F.silu(self.first(x))
        before = getattr(self, "before", ())
        past = before[0].seen.mul_(0.5) if before else 0.0
        return x + self.second((self.first(x) + past).tanh())


def chain_blocks(model: Stack) -> None:
    for before, block in zip(model.layers, list(model.layers)[1:], strict=False):
        block.__dict__["before"] = (before,)


@trap("module attributes counted")
class CountsCalls(Mlp):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.seen: list[float] = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.detach().sum().item())
        return x + self.calls * self.second(F.silu(self.first(x)))
