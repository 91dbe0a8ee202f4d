"""A chain of many blocks of different kinds is priced in few dry runs."""

import pytest
import torch
from torch import nn

import tightfit
from made_up_devices import even
from tightfit.planner.blocks import pricing


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.gate = nn.Linear(width, inner)

    def forward(self, x):
        x = self.norm(x)
        return x + self.down(torch.tanh(self.up(x)).exp() * self.gate(x).sigmoid())


class Chain(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, width) for width in inner)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def priced(model, monkeypatch):
    """A plan, and the number of dry runs that priced its blocks."""
    counts, price = [], pricing.price

    def counting(model, paths, trace, **given):
        runs = []
        found = price(model, paths, lambda policies: (runs.append(policies), trace(policies))[1], **given)
        counts.append(len(runs))
        return found

    monkeypatch.setattr("tightfit.planner.search.search.price", counting)
    batch = (torch.randn(512, 32), torch.randn(512, 32))
    plan = tightfit.plan(model, batch, "0.7x", loss=loss, optimizer="sgd", levers=["recompute"], device=even())
    return plan, max(counts)


@pytest.mark.slow  # twelve kinds of blocks
def test_twelve_kinds_of_one_block_take_no_dry_run_for_each_option(monkeypatch):
    few, runs_of_few = priced(Chain(range(64, 64 + 6)), monkeypatch)
    many, runs_of_many = priced(Chain(range(64, 64 + 12)), monkeypatch)
    # Beside the options: the plain run, and those for sets of least memory.
    assert runs_of_many <= 1 + pricing.FEW_TRACES + 2 < runs_of_few
    for plan in (few, many):
        assert plan.planned.peak_bytes <= plan.budget_bytes
