"""Where nothing else fits, feed-forwards run over a part of the sequence at a time; the peak is the allocator's."""

import pytest
import torch
from torch import nn

import tightfit
from tightfit import Plan
from tightfit.errors import CannotFit
from tightfit.levers.micro_batch import as_parts
from tightfit.planner.levers import TiledModules
from tightfit.planner.levers.tokenwise import find_tokenwise
from tightfit.tracing.step import trace_step
from tiny import allocator_peak, decoder, token_batch

LENGTH = 512
WITHOUT = ["recompute", "chunked_loss", "micro_batch"]


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=3, hidden_size=64, intermediate_size=512, max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def batch():
    return token_batch(1, LENGTH)


def least(model, batch, levers):
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, "0.01x", levers=levers)
    return caught.value.least_bytes


@pytest.fixture(scope="module")
def least_without(model, batch):
    """The least that the other levers need."""
    return least(model, batch, WITHOUT)


@pytest.fixture(scope="module")
def made(model, batch, least_without):
    return tightfit.plan(model, batch, int(0.99 * least_without), levers="rounding")


@pytest.mark.keeps("levers-exact-rounding-gradients", "plan-tiles-feed-forwards")
@pytest.mark.slow  # searches for the least
def test_below_what_the_other_levers_need_feed_forwards_are_tiled(model, batch, made):
    assert made.lever(TiledModules) is not None
    assert made.lever(TiledModules).paths == ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp")
    with made.apply(model):
        assert made.peak_bytes == allocator_peak(model, batch) <= made.budget_bytes
    report = tightfit.verify(model, batch, made)
    assert report.ok, str(report)


@pytest.mark.slow  # searches for the least, twice
def test_the_least_falls_and_there_is_a_plan_for_it(model, batch, least_without):
    after = least(model, batch, "rounding")
    assert after < 0.9 * least_without
    assert tightfit.plan(model, batch, after, levers="rounding").peak_bytes <= after


@pytest.mark.keeps("plan-tiles-feed-forwards")
@pytest.mark.slow  # two plans
def test_where_something_else_fits_nothing_is_tiled(model, batch, least_without):
    assert tightfit.plan(model, batch, least_without, levers="rounding").lever(TiledModules) is None


@pytest.mark.slow  # the least is searched
def test_it_is_not_among_the_bit_exact_levers(model, batch):
    with pytest.raises(CannotFit, match="the least is"):
        tightfit.plan(model, batch, int(0.99 * least(model, batch, ["recompute"])))


@pytest.mark.slow  # a plan with tiled blocks
def test_a_plan_survives_its_file_and_says_so(made, tmp_path):
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    assert f"3 feed-forwards (layers.0.mlp, ...) run over {made.lever(TiledModules).tokens} tokens at a time." in str(
        made
    )


class Positioned(nn.Module):
    """A feed-forward that adds something of its own to each of 16 positions."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.positions = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return self.down(self.up(x) + self.positions)


class Block(nn.Module):
    """A module that mixes tokens, one that draws random numbers, one that knows positions, one that does none of it."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(dim=1))
        self.random = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.positioned = Positioned()
        self.each = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.each(self.positioned(self.random(self.mixing(x))))


@pytest.mark.keeps("plan-tiles-feed-forwards")
def test_only_modules_that_treat_each_token_by_itself_are_found():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    batch = {"x": torch.randn(2, 16, 8)}
    parts = as_parts([batch], sum_of_squares)
    trace = trace_step(model, parts, sum_of_squares)
    assert find_tokenwise(trace, model, ["0", "1"]) == ["0.each", "1.each"]


def sum_of_squares(model, batch):
    return model(batch["x"]).square().sum()


class Scattered(nn.Module):
    """A feed-forward that is given rows, not sequences."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.each = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))

    def forward(self, x):
        return x + self.each(self.norm(x).flatten(0, 1)).view(x.shape)


def test_a_module_that_cannot_be_tiled_is_told_and_not_taken():
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Scattered() for _ in range(3))), {"x": torch.randn(2, LENGTH, 64)}
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, "0.01x", levers=["recompute", "tile"], loss=sum_of_squares)
    needed = tightfit.plan(model, batch, caught.value.least_bytes, levers=["recompute", "tile"], loss=sum_of_squares)
    assert needed.lever(TiledModules) is None
