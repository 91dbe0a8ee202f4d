"""Random programs of operators, views and in-place writes: wherever the plain step runs, recompute is bit-equal."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trap_levers import LEVERS, RandomPolicy, with_policy

from exactness import Outcome, assert_bit_equal, run

ROWS, WIDTH = 4, 8


def _assign(a: torch.Tensor, b: torch.Tensor) -> None:
    a[1:3] = b[1:3].cos()


def _fresh(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    out[:2] = a[:2]
    out[2:] = b[2:].detach()
    return out


def _without_gradient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return a * b.sigmoid()


def _by_numpy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.detach() * 1
    out.numpy()[...] *= 2
    return out


# Each takes two tensors of (ROWS, WIDTH) and gives one, or writes into the first.
PURE = {
    "sin": lambda a, b: a.sin(),
    "tanh": lambda a, b: a.tanh(),
    "scale": lambda a, b: a * 0.5,
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "matmul": lambda a, b: a @ b.t() @ b * 0.1,
    "softmax": lambda a, b: a.softmax(-1),
    "norm": lambda a, b: F.layer_norm(a, (WIDTH,)),
    "dropout": lambda a, b: F.dropout(a, 0.3),
    "noise": lambda a, b: a + torch.randn_like(b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "sort": lambda a, b: a.sort(-1).values,
    "largest": lambda a, b: a.scatter(-1, b.topk(2, -1).indices, 1.0),
    "cat": lambda a, b: torch.cat([a[:2], b[2:]]),
    "detach": lambda a, b: a.detach(),
    "clone": lambda a, b: a.clone(),
    "view": lambda a, b: a.view(-1).view(ROWS, WIDTH),
    "turned": lambda a, b: a.t().contiguous().t(),
    "data": lambda a, b: a.data,
    "fresh": _fresh,
    "without gradient": _without_gradient,
    "by numpy": _by_numpy,
}
WRITING = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b.detach().sigmoid()),
    "scale_": lambda a, b: a.mul_(0.9),
    "relu_": lambda a, b: a.relu_(),
    "copy_": lambda a, b: a.copy_(b),
    "dropout_": lambda a, b: F.dropout(a, 0.2, inplace=True),
    "through view": lambda a, b: a.view(-1)[::3].add_(1),
    "column": lambda a, b: a[:, 2].copy_(b[:, 1]),
    "assign": _assign,
    "data_": lambda a, b: a.data.clamp_(-0.5, 0.5),
}


class Program(nn.Module):
    """A block that runs a list of (operator, first, second) over the tensors made so far."""

    def __init__(self, lines: list[tuple[str, int, int]]):
        super().__init__()
        self.lines = lines
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("state", torch.ones(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x, self.linear(x.unsqueeze(0)).squeeze(0), self.state]
        for name, i, j in self.lines:
            first, second = values[i % len(values)], values[j % len(values)]
            if name in WRITING:
                WRITING[name](first, second)
            else:
                values.append(PURE[name](first, second))
        self.left = values[-2]
        return values[-1] + values[len(values) // 2]


class Model(nn.Module):
    def __init__(self, lines: list[tuple[str, int, int]]):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Program(lines) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            x = layer(x)
            x += 0.1
        return x + sum(layer.left for layer in self.layers)


def step(lines: list[tuple[str, int, int]], levers=None) -> Outcome:
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
    return run(Model(lines), x, levers=levers, times=4)  # the last two of which repeat what the second did


lines = st.lists(
    st.tuples(st.sampled_from([*PURE, *WRITING]), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=14
)


@pytest.mark.keeps("random-programs-too")
@settings(max_examples=100, deadline=None)
@given(lines, st.integers(0, 9), st.sampled_from(["whole blocks", "one segment", "two segments", "a random half"]))
def test_recompute_of_a_random_program_is_bit_equal(program, seed, lever):
    try:
        plain = step(program)
    except RuntimeError:
        return  # autograd itself refuses the program: a value that it needs was overwritten
    if lever == "a random half":
        assert_bit_equal(plain, step(program, lambda model: with_policy(RandomPolicy(seed=seed), model)))
    else:
        assert_bit_equal(plain, step(program, LEVERS[lever]))
