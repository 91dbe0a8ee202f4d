"""Blocks that return what they go on to compute with, as models of transformers do with their caches, are captured."""

import copy
import warnings

import pytest
import torch
from torch import nn

import tightfit
from exactness import assert_bit_equal, run, sum_of_squares
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL
from tiny import Stack

pytestmark = pytest.mark.keeps("block-returns-goes-compute")

POLICIES = {"keep all": KEEP_ALL, "recompute all": RECOMPUTE_ALL}


class Cached(nn.Module):
    """A block that stores its keys, normed and transposed as in transformers, and attends to them."""

    def __init__(self, heads: int = 2, width: int = 16):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.out = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.Parameter(torch.rand(width // heads))

    def forward(self, x):
        query, keys = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key))
        keys = keys * (keys.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm
        self.cache = torch.cat([torch.tensor([]), keys], dim=-2)
        scores = (query @ self.cache.transpose(-1, -2)).softmax(-1)
        return x + self.out((scores @ self.cache).transpose(1, 2).flatten(2))


def without_caches(model, x):
    return sum_of_squares(model, x)


def with_some_caches(model, x):
    """A loss that reads one block's cache, at several places and in another layout, and leaves the others."""
    result = model(x)
    cache = model.layers[1].cache
    return result.square().mean() + (cache.transpose(1, 3) * 0.3).tanh().sum() + cache[:, :, 1:].exp().mean()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("loss", [without_caches, with_some_caches])
def test_what_a_block_returns_and_computes_with_has_the_gradients_of_eager_code(loss, policy):
    torch.manual_seed(0)
    model, x = Stack(*(Cached() for _ in range(3))), torch.randn(3, 7, 16, requires_grad=True)
    plain = run(copy.deepcopy(model), x, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is run without being captured
        assert_bit_equal(plain, run(model, x, loss, levers=lambda m: tightfit.capture(m, "layers.*", policy=policy)))
