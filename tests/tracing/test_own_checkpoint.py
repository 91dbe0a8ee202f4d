"""Blocks that call `torch.utils.checkpoint` themselves: the random states that it holds are counted."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightfit
from round_device import round_device
from tightfit.memory.allocator import measured_peak
from tightfit.optim.by_name import state_tensors
from tightfit.step import model_loss

WIDTH = 32
ROUNDING = 64  # bytes: numbers that Python wraps
BATCH = {"x": torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))}
WAYS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "without random states": {"use_reentrant": False, "preserve_rng_state": False},
}


class Block(nn.Module):
    """A checkpoint around its first part only."""

    def __init__(self, way):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way = way

    def part(self, x):
        return nn.functional.dropout(torch.tanh(self.up(x)), 0.1)

    def forward(self, x):
        return x + torch.tanh(self.down(checkpoint(self.part, self.norm(x), **self.way)))


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(way) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def measured(model, optimizer):
    def step():
        model_loss(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return measured_peak(step, [*model.parameters(), *state_tensors(optimizer), *BATCH.values()])


@pytest.mark.sampled(1)
@pytest.mark.keeps("block-own-checkpoint-predicted")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_estimate_is_what_the_allocator_records(way):
    model = Model(way)
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = tightfit.estimate(model, BATCH, optimizer=optimizer, device=round_device()).peak_bytes
    assert abs(measured(model, optimizer) - predicted) <= ROUNDING


@pytest.mark.sampled(1)
@pytest.mark.keeps("block-own-checkpoint-predicted")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_plan_is_measured_as_planned(way):
    model = Model(way)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = tightfit.plan(model, BATCH, "0.9x", optimizer=optimizer, device=round_device())
    with plan.apply(model):
        assert abs(measured(model, optimizer) - plan.peak_bytes) <= ROUNDING


def test_afterwards_random_states_are_pytorchs_own():
    before = torch.get_rng_state
    tightfit.estimate(Model(WAYS["reentrant"]), BATCH, device=round_device())
    assert torch.get_rng_state is before
