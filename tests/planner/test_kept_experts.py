"""What a plan keeps of some experts it keeps of all: a block holds the same whichever ones a router prefers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tightfit
from round_device import round_device
from tiny import allocator_peak

EXPERTS = 3


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 96, bias=False), nn.Linear(width, 96, bias=False)
        self.down = nn.Linear(96, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Each token goes to one expert: `prefers` moves them."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(Gated(width) for _ in range(EXPERTS))

    def forward(self, x):
        flat = self.norm(x).flatten(0, -2)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            y = y.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + y.view_as(x)


def model(preferred=None):
    torch.manual_seed(0)
    made = nn.Sequential(*(Block() for _ in range(6)))
    if preferred is not None:
        for block, number in zip(made, preferred, strict=True):
            block.router.bias.data[number] += 1e3
    return made


def squares(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.sampled(1)
@pytest.mark.keeps("experts-kept-alike")
@pytest.mark.parametrize("budget", ["0.95x", "0.9x", "0.85x", "0.8x"])
def test_a_block_holds_the_same_whichever_experts_its_router_prefers(budget):
    batch = {"x": torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0))}
    plan = tightfit.plan(model(), batch, budget, loss=squares, optimizer="sgd", device=round_device())
    assert any(choice.action == "operators" for choice in plan.choices)
    found = []
    for preferred in (None, [0] * 6, [1] * 6, [2] * 6, [0, 1, 2, 0, 1, 2], [2, 1, 0, 2, 1, 0]):
        made = model(preferred)
        with plan.apply(made):
            found.append(allocator_peak(made, batch, loss=squares, optimizer="sgd"))
    assert found[0] == plan.peak_bytes
    assert max(found) == plan.worst_peak_bytes <= plan.budget_bytes
