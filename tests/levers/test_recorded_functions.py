"""The recorder runs PyTorch's pure functions without its dispatch mode, and records the same operators."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit import recompute
from tightfit.levers.recompute import observer, programs
from tightfit.levers.recompute.recorder import Recorder
from tightfit.memory.allocator import measured_peak

WIDTH = 16


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.1):
        super().__init__()
        self.norm, self.root = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(F.gelu(self.root(x))).softmax(-1) * -0.0


def step(model, x):
    torch.manual_seed(3)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


@pytest.fixture
def seen(monkeypatch):
    """Counts the operators that come to a recorder's dispatch mode."""
    counts = Counter()
    original = Recorder.__torch_dispatch__

    def counting(self, func, types, args=(), kwargs=None):
        counts[str(func)] += 1
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", counting)
    programs.PROGRAMS.clear()
    return counts


def test_functions_are_learnt_once_and_then_run_without_the_dispatch_mode(model, seen):
    x = torch.randn(2, 5, WIDTH)
    expected = step(model, x)
    with recompute(model, "*"):
        first = step(model, x)
        # The input of the first block has no gradient, which is another signature. The third block is like the second.
        assert seen["aten.native_layer_norm.default"] == 2
        assert seen["aten.bernoulli_.float"] == 1
        seen.clear()
        second = step(model, x)
        assert set(seen) <= {"aten.detach.default"}
        longer = torch.randn(2, 7, WIDTH)
        step(model, longer)
        assert seen["aten.native_layer_norm.default"] == 2  # another shape is another signature
    for found in (first, second):
        assert all(map(torch.equal, expected, found))


def test_the_bytes_are_those_of_a_recorder_that_sees_each_operator(model, monkeypatch):
    x = torch.randn(2, 5, WIDTH)

    def peak():
        model.zero_grad()
        return measured_peak(lambda: step(model, x), [*model.parameters(), x])

    with recompute(model, "*"):
        step(model, x)
        learnt = peak()
        monkeypatch.setattr(observer, "KNOWN", {})
        assert peak() == learnt


def call(function, *tensors):
    """Gradients of a function, in a block and outside."""

    class Given(nn.Module):
        def forward(self, *inputs):
            return function(*[t * 1 for t in inputs])

    inputs = [t.clone().requires_grad_() for t in tensors]
    model = nn.Sequential(Given())
    expected = torch.autograd.grad(model[0](*inputs).sum(), inputs)
    with recompute(model, "*"):
        found = torch.autograd.grad(model[0](*inputs).sum(), inputs)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    "functions",
    [
        pytest.param((lambda a, b: a * a + b, lambda a, b: a * b + a), id="the same tensor twice"),
        pytest.param((lambda a, b: (a * 0.0) / b, lambda a, b: (a * -0.0) / b), id="zeros of two signs"),
        pytest.param((lambda a, b: a * 1 + b * True, lambda a, b: a * 1.0 + b * 1), id="equal numbers"),
        pytest.param((lambda a, b: a.mT @ b, lambda a, b: a @ b), id="strides"),
        pytest.param((lambda a, b: a.pow(2) * b, lambda a, b: a.pow(3) * b), id="exponents"),
        pytest.param((lambda a, b: torch.cat([a, b]).exp(), lambda a, b: torch.cat([b, a], -1).exp()), id="lists"),
        pytest.param((lambda a, b: F.relu(a, inplace=True) * b, lambda a, b: F.relu(a) * b), id="in place"),
        pytest.param(
            (lambda a, b: (a + b).add_(b).exp() * a, lambda a, b: (a + b).sub_(b).exp() * a), id="writes between"
        ),
    ],
)
def test_calls_that_differ_are_not_taken_for_each_other(functions):
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(2):
        for function in functions:
            call(function, a, b)


def test_an_error_in_a_function_leaves_the_recorder_as_it_was(model):
    x = torch.randn(2, 5, WIDTH)
    expected = step(model, x)
    with recompute(model, "*"):
        step(model, x)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, WIDTH + 1))
        assert torch._C._len_torch_dispatch_stack() == 0
        assert all(map(torch.equal, expected, step(model, x)))
