"""Functions of PyTorch that differ in one argument, recorded one after the other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit import recompute

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


@pytest.mark.keeps("functions-called-differ-argument")
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
