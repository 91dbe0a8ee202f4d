"""Checkpoints of the model's own around blocks that move buffers: they run again as far as a tensor that they saved."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import tightfit
from exactness import assert_bit_equal, run
from tightfit.errors import CannotFit, RecomputeError
from tightfit.levers.recompute.region import buffer_versions, changed
from tightfit.verification import verify

LEVERS = {
    "recomputed": lambda model: tightfit.recompute(model, "layers.*"),
    "captured": lambda model: tightfit.capture(model, "layers.*"),
    "offloaded": lambda model: tightfit.offload(model, "layers.*"),
}


class Counted(nn.Module):
    """A layer with a buffer that each run replaces, as a moving average of a statistic."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean()
        return x * 1.5


MOVING = {
    "batch norm": nn.BatchNorm1d,
    "spectral norm": lambda width: spectral_norm(nn.Linear(width, width)),
    "moving average": Counted,
}


class Block(nn.Module):
    def __init__(self, layer, width=32):
        super().__init__()
        self.layer, self.up, self.down = layer(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(()))  # one that no step writes, as most blocks have

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.layer(x.flatten(0, 1))))).view_as(x) * self.scale


class Checkpointed(nn.Module):
    """Three blocks in a checkpoint, and three in another."""

    def __init__(self, layer, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.layers = nn.ModuleList(Block(layer) for _ in range(6))
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 1)

    def part(self, x, begin):
        for layer in self.layers[begin : begin + 3]:
            x = layer(x)
        return x

    def forward(self, x):
        x = self.first(x)
        for begin in (0, 3):
            x = checkpoint(self.part, x, begin, use_reentrant=self.reentrant)
        return self.head(x)


def loss(model, batch):
    return model(*batch).square().mean()


BATCH = (torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("layer", MOVING)
def test_a_lever_on_blocks_that_move_buffers_there_is_refused_by_name(layer, lever):
    model = Checkpointed(MOVING[layer])
    with LEVERS[lever](model), pytest.raises(RecomputeError, match=r"layers\.0: it writes its buffer layer\..*leave"):
        loss(model, BATCH)


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize(("layer", "reentrant"), [(nn.LayerNorm, False), (nn.BatchNorm1d, True)])
def test_blocks_without_such_buffers_and_in_reentrant_checkpoints_keep_every_bit(layer, reentrant, lever):
    model = Checkpointed(layer, reentrant)
    plain = run(copy.deepcopy(model), BATCH, loss)
    assert_bit_equal(plain, run(model, BATCH, loss, levers=LEVERS[lever]))


@pytest.mark.keeps("recompute-leaves-loss-gradients")
@pytest.mark.parametrize("layer", ["batch norm", "moving average"])
def test_a_plan_leaves_them_alone(layer):
    model = Checkpointed(MOVING[layer])
    with pytest.raises(CannotFit, match=r"reached by no lever.*buffers move in a checkpoint"):
        tightfit.plan(model, BATCH, "0.5x", loss=loss, levers=("recompute", "capture"))
    with pytest.raises(RecomputeError, match=r"layers\.\d: it writes its buffer"):
        tightfit.plan(model, BATCH, "0.9x", loss=loss, levers=("recompute",), blocks="layers.*")


def test_a_plan_recomputes_blocks_without_such_buffers():
    model = Checkpointed(nn.LayerNorm)
    planned = tightfit.plan(model, BATCH, "0.9x", loss=loss, levers=("recompute",))
    assert any(choice.action != "keep" for choice in planned.choices)
    assert verify(model, BATCH, planned, loss=loss).ok


def test_a_new_buffer_is_told_from_an_old_one_at_its_address():
    module = Counted(4)
    before, address = buffer_versions(module), id(module.average)
    for _ in range(100):
        module.average = None  # which gives its address to the next tensor
        module.average = torch.zeros(())
        if id(module.average) == address:
            break
    assert changed(before, buffer_versions(module)) == "average"
