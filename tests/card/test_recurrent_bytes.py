"""Recurrent networks on a card take the bytes that a dry run says: cuDNN's operator, with an assumed reserve."""

import pytest
import torch
from torch import nn

import tightfit
from tightfit.runtime.internals import clear_cublas_workspaces

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch's CUDA build and a card"),
    pytest.mark.usefixtures("null_card", "nothing_cached"),  # what cuDNN keeps is its own choice, which is not known
    pytest.mark.keeps("recurrent-networks-on-cards"),
]
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
# Without dropout: cuDNN's state of it stays for the whole process, and the rest of its segment rounds other blocks.
SETTINGS = {
    "steps first": {},
    "batch first": {"batch_first": True},
    "both directions": {"batch_first": True, "bidirectional": True},
    "one layer": {"num_layers": 1, "batch_first": True},
    "without biases": {"bias": False},
}
# Why two directions are further off in 16 bits was not looked into.
ALLOWED = {"both directions": 0.0135}


class Reader(nn.Module):
    """An embedding, a network and a head. Mutable: `packed` packs the rows."""

    def __init__(self, kind, packed=False, **settings):
        super().__init__()
        self.packed, self.embedding = packed, nn.Embedding(1000, 64)
        self.cells = KINDS[kind](64, 128, **{"num_layers": 2, **settings})
        self.head = nn.Linear(128 * (1 + settings.get("bidirectional", False)), 1000)

    def forward(self, x):
        rows = self.embedding(x)
        if self.packed:
            rows = nn.utils.rnn.pack_padded_sequence(rows, torch.full((len(x),), x.shape[1]), batch_first=True)
        out = self.cells(rows)[0]
        return self.head(out.data if self.packed else out).float().logsumexp(-1).mean()


def measured(model, batch, optimizer, precision):
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [*SETTINGS, "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_the_predicted_bytes(kind, settings, precision):
    clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    how = {"packed": True, "batch_first": True} if settings == "packed" else SETTINGS[settings]
    model, batch = Reader(kind, **how).cuda(), (torch.zeros(16, 64, dtype=torch.long, device="cuda"),)
    found = tightfit.estimate(
        model, batch, loss=lambda m, b: m(*b), optimizer="sgd", device="cuda", precision=precision
    )
    torch.cuda.reset_peak_memory_stats()
    peak = measured(model, batch, torch.optim.SGD(model.parameters(), lr=0.1), precision) - before
    assert abs(found.peak_bytes - peak) <= ALLOWED.get(settings, 0.0005) * peak


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.cells = nn.LayerNorm(64), KINDS[kind](64, 64, 2, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        x = x + self.cells(self.norm(x))[0]
        return x + self.wide(x)


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.filterwarnings("error::tightfit.levers.recompute.expected.OtherOperators")
def test_a_plan_stays_within_its_budget(kind, precision):
    clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    model, batch = Stack(kind).cuda(), (torch.randn(16, 256, 64, device="cuda"),)
    how = {"optimizer": "sgd", "device": "cuda", "levers": ["recompute"], "precision": precision}
    plan = tightfit.plan(model, batch, "0.8x", loss=lambda m, b: m(*b), **how)
    clear_cublas_workspaces()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with plan.apply(model):
        torch.cuda.reset_peak_memory_stats()  # the first step too: a block of a GRU stack is not split there
        peak = measured(model, batch, optimizer, precision) - before
    assert plan.peak_bytes * 0.999 <= peak <= plan.budget_bytes
