"""Nested tensors: jagged ones are estimated where no attention runs, and what cannot be is refused in one line."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tightfit
from round_device import round_device
from tightfit.errors import LeverError, TraceError
from tightfit.memory.allocator import cpu_rise

LENGTHS = (24, 17, 9, 5)


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.arange(n) for n in LENGTHS], layout=layout)


class Net(nn.Module):
    def __init__(self, attends, d=32):
        super().__init__()
        self.embed, self.norm, self.up, self.down = (
            nn.Embedding(64, d),
            nn.LayerNorm(d),
            nn.Linear(d, d),
            nn.Linear(d, d),
        )
        self.attends = attends

    def forward(self, ids):
        x = self.embed(ids)
        y = self.up(self.norm(x))
        if self.attends:
            q = y.unflatten(-1, [4, -1]).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)
        return x + self.down(F.gelu(y))


def loss(model, batch):
    return model(*batch).values().square().mean()


def test_jagged_tensors_are_estimated():
    model, batch = Net(attends=False), (nested(torch.jagged),)
    loss(model, batch).backward()
    model.zero_grad(set_to_none=True)
    rise = cpu_rise(lambda: loss(model, batch).backward())
    resident = sum(p.numel() * 4 for p in model.parameters()) + batch[0].values().nbytes + batch[0].offsets().nbytes
    found = tightfit.estimate(Net(attends=False), batch, loss=loss, optimizer="sgd", device=round_device())
    assert found.peak_bytes == pytest.approx(rise + resident, rel=0.01)


def test_attention_over_them_is_refused_in_one_line():
    with pytest.raises(TraceError, match=r"pad them with .* and pass a mask") as caught:
        tightfit.estimate(Net(attends=True), (nested(torch.jagged),), loss=loss, device=round_device())
    assert "\n" not in str(caught.value)
    assert "report a bug" not in str(caught.value)


def test_a_batch_of_strided_ones_is_refused_in_one_line():
    with pytest.raises(LeverError, match="make it with layout="):
        tightfit.estimate(Net(attends=False), (nested(torch.strided),), loss=loss, device=round_device())
