"""On CUDA's path `verify` compares two runs that draw the same numbers, and leaves the card's generator alone."""

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import LeverError
from tightfit.levers.recompute.generators import GeneratorState
from tightfit.planner.separation import refuse_coupled

pytestmark = [pytest.mark.usefixtures("values"), pytest.mark.keeps("verify-leaves-generators")]


class Drops(nn.Module):
    """Blocks that drop, and noise on their input from the card's generator or one of the model's own."""

    def __init__(self, own: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32)) for _ in range(3)
        )
        self.cuda()
        self.own = torch.Generator("cuda").manual_seed(7) if own else None

    def forward(self, x):
        x = x + torch.randn(x.shape, generator=self.own, device="cuda")
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(model, batch):
    return model(*batch).square().mean()


def states(model):
    return [torch.cuda.get_rng_state(), *([model.own.get_state()] if model.own is not None else [])]


@pytest.mark.parametrize("own", [False, True])
def test_a_plan_of_blocks_that_drop_is_verified_and_no_generator_moves(own):
    model, batch = Drops(own), (torch.randn(8192, 32, device="cuda"),)
    before = states(model)
    made = tightfit.plan(model, batch, "0.8x", loss=loss)
    assert made.levers
    report = tightfit.verify(model, batch, made, loss=loss)
    assert report.ok, report
    assert all(map(torch.equal, before, states(model)))


def test_a_replay_that_draws_other_numbers_is_found(monkeypatch):
    model, batch = Drops(own=False), (torch.randn(8192, 32, device="cuda"),)
    made = tightfit.plan(model, batch, "0.8x", loss=loss, levers=["recompute"])
    monkeypatch.setattr(GeneratorState, "put_back", lambda self: None)
    assert not tightfit.verify(model, batch, made, loss=loss).ok


@pytest.mark.parametrize("own", [False, True])
def test_noise_that_a_loss_draws_on_the_card_is_refused_for_micro_batches(own):
    with pytest.raises(LeverError, match="random numbers"):
        refuse_coupled(Drops(own), (torch.randn(32, 32, device="cuda"),), loss)
