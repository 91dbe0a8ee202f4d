"""What autograd writes in place in a real step is counted so, although it looks out of place under a dispatch mode."""

import pytest
import torch
from torch import nn

from round_device import round_device
from tightfit.planner.api import estimate, plan
from tiny import allocator_peak

ROWS, WIDTH = 512, 64


class Formula(nn.Module):
    """A function whose backward holds the peak, between two small layers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, index):
        return self.last(self.function(self.first(x), index)).sum()


def wide(x):
    return x.repeat(1, 8)


FORMULAS = {
    "gather": lambda x, index: wide(x).gather(1, index[:, None].expand(-1, WIDTH)),
    "index": lambda x, index: wide(x)[index][:, :WIDTH],
    "index_select": lambda x, index: wide(x).index_select(0, index)[:, :WIDTH],
    "max": lambda x, index: wide(x).view(ROWS, WIDTH, 8).max(-1).values,
    "sort": lambda x, index: wide(x).sort(-1).values[:, :WIDTH],
    "topk": lambda x, index: wide(x).topk(WIDTH).values,
    "index_add": lambda x, index: wide(x).index_add(0, index, wide(x))[:, :WIDTH],
    "scatter_add": lambda x, index: wide(x).scatter_add(1, index[:, None].expand(-1, WIDTH), x)[:, :WIDTH],
    "cumsum": lambda x, index: wide(x).cumsum(1)[:, :WIDTH],
    "sum of three uses": lambda x, index: (wide(x).sin() + wide(x).cos() * wide(x))[:, :WIDTH],
    "sum of views": lambda x, index: sum(wide(x).view(ROWS, 8, WIDTH)[:, i].sin() for i in range(8)),
    # A node's own sum is out of place. The sum of gradients that a node gives twice to one place is autograd's.
    "var_mean": lambda x, index: sum(each.sum() for each in torch.var_mean(wide(x), -1)) * x,
    "std_mean": lambda x, index: sum(each.sum() for each in torch.std_mean(wide(x), -1)) * x,
    "pinv": lambda x, index: torch.linalg.pinv(wide(x)[:96])[:1, :1] * x,
    "square by a product": lambda x, index: (lambda y: (y * y)[:, :WIDTH])(wide(x)),
    "attention of one tensor": lambda x, index: (lambda y: nn.functional.scaled_dot_product_attention(y, y, y))(
        x.view(8, 8, 8, WIDTH)
    ).reshape(ROWS, WIDTH),
    "median": lambda x, index: wide(x).view(ROWS, WIDTH, 8).median(-1).values,
    "amax": lambda x, index: wide(x).view(ROWS, WIDTH, 8).amax(-1),
    "mean squared error": lambda x, index: (wide(x) * nn.functional.mse_loss(wide(x), wide(x).detach()))[:, :WIDTH],
    "norm": lambda x, index: wide(x).view(ROWS, WIDTH, 8).norm(dim=-1),
    "logsumexp": lambda x, index: wide(x).view(ROWS, WIDTH, 8).logsumexp(-1),
    "logcumsumexp": lambda x, index: wide(x).logcumsumexp(1)[:, :WIDTH],
    "masked_fill": lambda x, index: wide(x).masked_fill(index[:, None] > 3, 0.0)[:, :WIDTH],
    "where": lambda x, index: torch.where(index[:, None] > 3, wide(x), wide(x).sin())[:, :WIDTH],
    "take_along_dim": lambda x, index: wide(x).take_along_dim(index[:, None].expand(-1, WIDTH), 1),
    "unfold": lambda x, index: wide(x).unfold(1, 8, 8).sum(-1),
    "flip and roll": lambda x, index: wide(x).flip(1).roll(1, 1)[:, :WIDTH],
    "conv1d": lambda x, index: nn.functional.conv1d(
        wide(x).view(8, WIDTH, -1), torch.ones(WIDTH, 1, 4), padding=3, groups=WIDTH
    )[..., :512].reshape(-1, WIDTH),
    "einsum": lambda x, index: (
        torch.einsum("abc,adc->abd", wide(x).view(8, 64, -1), x.view(8, 8, -1)).reshape(-1, 8).repeat(1, 8)
    ),
    "product with a mask": lambda x, index: (wide(x) * (index[:, None] > 3).expand(-1, 512).clone())[:, :WIDTH],
    "softplus, silu": lambda x, index: nn.functional.silu(nn.functional.softplus(wide(x)))[:, :WIDTH],
}


@pytest.mark.keeps("dry-run-counts-autograd")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMULAS)
def test_the_peak_of_a_backward_formula_is_the_allocators(name):
    model = Formula(FORMULAS[name])
    batch = {"x": torch.randn(ROWS, WIDTH), "index": torch.arange(ROWS) % WIDTH}
    assert estimate(model, batch).peak_bytes == pytest.approx(allocator_peak(model, batch), rel=0.001)


class Wide(nn.Module):
    """A wide layer over rows in another order than they lie, of which a few numbers are kept."""

    def __init__(self, product):
        super().__init__()
        self.product, self.layer = product, nn.Linear(WIDTH, 1024)

    def forward(self, x):
        return self.product(x.transpose(0, 1), self.layer.weight, self.layer.bias)[..., :4].square().sum()


def called(function, *operands):
    return function(*operands)  # the same instruction for a product and for the sum after it, of two calls


PRODUCTS = {
    "linear": nn.functional.linear,
    "operators": lambda x, weight, bias: x @ weight.T + bias,
    "operators by one function": lambda x, weight, bias: called(torch.add, called(torch.matmul, x, weight.T), bias),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_bias_is_added_in_place_by_linear_and_not_by_what_is_written_like_it(product):
    model, batch = Wide(product), {"x": torch.randn(WIDTH, WIDTH, WIDTH)}
    assert estimate(model, batch).peak_bytes == allocator_peak(model, batch)


class Mixing(nn.Module):
    """A block whose wide layer reads rows in another order than they lie."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        wide = torch.relu(self.up(x.transpose(0, 1)))
        return x + self.down(wide.view(*wide.shape[:2], 8, WIDTH).mean(2)).transpose(0, 1)


def test_a_recomputed_block_adds_its_bias_as_its_plan_says():
    model, batch = nn.Sequential(*(Mixing() for _ in range(3))), {"input": torch.randn(WIDTH, WIDTH, WIDTH)}

    def loss(model, batch):
        return model(**batch).square().mean()

    made = plan(model, batch, "0.9x", loss=loss, optimizer="sgd", levers=["recompute"], device=round_device())
    assert made.levers
    with made.apply(model):
        assert allocator_peak(model, batch, loss=loss, optimizer="sgd") == made.peak_bytes
