"""Random blocks that share inputs, parameters and results: each reads several of them, any number of times."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
OPERATORS: dict[str, Callable[["RandomBlock", Tensor, Tensor], Tensor]] = {
    "linear": lambda block, a, b: block.linear(a),
    "again": lambda block, a, b: block.linear(b) * a,
    "product": lambda block, a, b: a * b,
    "square": lambda block, a, b: a * a,
    "sum": lambda block, a, b: a + b,
    "norm": lambda block, a, b: block.norm(a),
    "root mean square": lambda block, a, b: block.rms(a),
    "gelu": lambda block, a, b: F.gelu(a),
    "softmax": lambda block, a, b: a.softmax(-1),
    "halves": lambda block, a, b: torch.cat([a.chunk(2, -1)[1], (a * b).chunk(2, -1)[0][: len(a)]], -1),
    "detached": lambda block, a, b: a.detach() * b,
    "attention": lambda block, a, b: F.scaled_dot_product_attention(a, b, a),
    "buffer": lambda block, a, b: a + block.buffer * block.shared,
    "shared": lambda block, a, b: block.shared * a + block.shared.square(),
    "transposed": lambda block, a, b: torch.tanh(a @ b.transpose(-1, -2)) @ a,
}


class RandomBlock(nn.Module):
    """Operators on a stream, a condition and a learnt tensor. A subclass draws its `steps` once."""

    steps: tuple[tuple[str, float, float], ...]
    has_second_result: bool

    def __init__(self, shared: nn.Parameter | None):
        super().__init__()
        self.linear, self.norm, self.rms = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.shared = nn.Parameter(torch.randn(WIDTH)) if shared is None else shared
        self.register_buffer("buffer", torch.randn(WIDTH))

    def forward(self, stream: Tensor, condition: Tensor, learnt: Tensor):
        values = [stream, condition, learnt, stream]
        for name, first, second in self.steps:
            a, b = (values[int(place * len(values))] for place in (first, second))
            values.append(OPERATORS[name](self, a, b))
        result = values[-1] + values[-2]
        return (result, values[-3] * self.shared + self.norm(values[3])) if self.has_second_result else result


class RandomNet(nn.Module):
    """Three blocks, each perhaps called twice, whose inputs and results are perhaps read elsewhere too."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        steps = tuple((draw.choice(list(OPERATORS)), draw.random(), draw.random()) for _ in range(draw.randint(3, 7)))
        kind = type("Drawn", (RandomBlock,), {"steps": steps, "has_second_result": draw.random() < 0.4})
        self.calls = 1 + (draw.random() < 0.3)
        self.place = draw.choice(["between", "nowhere", "loss"])
        shared = nn.Parameter(torch.randn(WIDTH)) if draw.random() < 0.4 else None
        self.condition, self.begin = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.learnt = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(kind(shared) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        condition, x = self.condition(x), self.begin(x)
        loss = torch.zeros(())
        for block in self.blocks:
            for _ in range(self.calls):
                found = block(x, condition, condition if self.place == "nowhere" else self.learnt)
                x, second = found if isinstance(found, tuple) else (found, None)
                if second is not None and self.place == "loss":
                    x = x + second
            if self.place == "between":
                x = x + 0.1 * condition
            elif self.place == "loss":
                loss = loss + x.mean() + condition.square().mean()
        return loss + x.square().mean()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """The gradients of one backward; None where there is none."""
    model.zero_grad()
    model(x).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def differing(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> list[str]:
    """The names of gradients that differ in a bit, or exist in one only."""
    pairs = {name: (one[name], other[name]) for name in one}
    return [
        name
        for name, (a, b) in pairs.items()
        if (a is None) != (b is None)
        or (a is not None and b is not None and not torch.equal(a.nan_to_num(), b.nan_to_num()))
    ]
