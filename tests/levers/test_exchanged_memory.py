"""A tensor that is set to its own memory exchanges nothing: parametrisations do that within a block."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tightfit
from round_device import round_device
from tightfit.errors import RecomputeError
from tiny import Stack

pytestmark = pytest.mark.keeps("parametrisation-sets-weight-itself")


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class Parametrised(nn.Module):
    """A block that adapts its weight for the length of a forward, as peft's `target_parameters` do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64)

    def forward(self, x):
        parametrize.register_parametrization(self.up, "weight", Doubled())
        try:
            return self.down(nn.functional.gelu(self.up(x)))
        finally:
            parametrize.remove_parametrizations(self.up, "weight", leave_parametrized=False)


class Exchanged(Parametrised):
    def forward(self, x):
        scratch = torch.zeros(4)
        scratch.set_(torch.ones(4))
        return self.down(nn.functional.gelu(self.up(x * scratch[0])))


def square(model, batch):
    return model(batch["x"]).square().mean()


def test_a_block_that_parametrises_its_weight_is_planned_bit_by_bit():
    torch.manual_seed(0)
    model, batch = Stack(*(Parametrised() for _ in range(4))), {"x": torch.randn(512, 64)}
    plan = tightfit.plan(
        model, batch, "0.7x", loss=square, levers=["recompute"], device=round_device(), optimizer="sgd"
    )
    assert str(tightfit.verify(model, batch, plan, loss=square)).startswith("bit-equal")


def test_an_exchange_of_memory_is_refused_by_name():
    model = Stack(Exchanged(), Exchanged())
    with (
        tightfit.recompute(model, "layers.*"),
        pytest.raises(RecomputeError, match=r"layers\.0: aten\.set_.* exchanges"),
    ):
        model(torch.randn(8, 64))
