"""Generators of random numbers that a model owns are put back as they were."""

import random

import numpy
import pytest
import torch
from torch import nn

import tightfit
from round_device import round_device

WIDTH = 16


class Noisy(nn.Module):
    """A block that drops by its own generator."""

    def __init__(self, place):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(1)
        self.own = {"attribute": generator, "list": [generator], "dict": {"noise": (generator,)}}[place]

    @property
    def generator(self):
        own = self.own["noise"] if isinstance(self.own, dict) else self.own
        return own[0] if isinstance(own, list | tuple) else own

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden * (torch.rand(hidden.shape, generator=self.generator) > 0.1))


def loss(model, batch):
    return model(batch["x"]).pow(2).mean()


@pytest.mark.keeps("generators-model-owns-restored")
@pytest.mark.parametrize("place", ["attribute", "list", "dict"])
def test_a_plan_of_a_block_with_a_generator_is_verified(place):
    torch.manual_seed(0)
    model = nn.Sequential(*[Noisy(place) for _ in range(3)])
    batch = {"x": torch.randn(512, WIDTH)}
    before = [block.generator.get_state() for block in model]
    plan = tightfit.plan(model, batch, "0.8x", loss=loss, device=round_device())
    assert any(choice.action != "keep" for choice in plan.choices)
    assert tightfit.verify(model, batch, plan, loss=loss).ok
    assert all(torch.equal(state, block.generator.get_state()) for state, block in zip(before, model, strict=True))


class Drawing(nn.Module):
    """Draws from generators of other libraries, once a forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.own = [random.Random(1), numpy.random.default_rng(2), numpy.random.RandomState(3)]

    def forward(self, x):
        return (self.weight * x).sum() * sum(float(own.random()) for own in self.own[:2]) * float(self.own[2].rand())


def test_generators_of_other_libraries_are_put_back():
    model = Drawing()
    expected = model(torch.ones(4))
    model.own = Drawing().own
    tightfit.estimate(model, (torch.ones(4),), device=round_device())
    assert torch.equal(model(torch.ones(4)), expected)


OF_THIS_FILE, NUMPYS_OF_THIS_FILE = random.Random(1), numpy.random.default_rng(1)


class DropsLayers(nn.Module):
    """Four layers, of which `draw` skips those whose number is low."""

    def __init__(self, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.draw, self.own = draw, numpy.random.default_rng(1)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).sin() if self.draw(self) > 0.3 else x
        return x


@pytest.mark.parametrize(
    "draw",
    [
        lambda model: model.own.random(),
        lambda model: float(model.own.random(dtype=numpy.float32)),
        lambda model: model.own.integers(10) / 10,
        lambda model: OF_THIS_FILE.random(),
        lambda model: NUMPYS_OF_THIS_FILE.random(),
    ],
    ids=["numpy's own", "in fp32", "whole", "Python's of this file", "numpy's of this file"],
)
def test_layers_that_any_generator_in_reach_drops_are_assumed_to_run(draw):
    model, batch = DropsLayers(draw), {"x": torch.randn(512, WIDTH)}
    bits, before = model.own.bit_generator, [model.own.bit_generator.state, NUMPYS_OF_THIS_FILE.bit_generator.state]
    found = tightfit.estimate(model, batch, loss=lambda m, b: loss(m, b) + sum(p.sum() for p in m.parameters()))
    every = tightfit.estimate(
        DropsLayers(lambda model: 1.0), batch, loss=lambda m, b: loss(m, b) + sum(p.sum() for p in m.parameters())
    )
    assert found.peak_bytes == every.peak_bytes
    assert any("random numbers that decide what runs" in line for line in found.assumptions)
    assert model.own.bit_generator is bits
    assert [model.own.bit_generator.state, NUMPYS_OF_THIS_FILE.bit_generator.state] == before
