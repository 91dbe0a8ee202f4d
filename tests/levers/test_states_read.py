"""A replay reads the state of a CPU's random generator, which takes PyTorch's memory for a moment: dry runs count it.

The steps here are so small that these 5 kB are their peak.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from round_device import round_device
from tightfit.devices.present import lookup
from tightfit.levers.captured.lever import capture
from tightfit.levers.offload.lever import offload
from tightfit.levers.recompute.lever import recompute
from tightfit.levers.recompute.policy import RECOMPUTE_ALL
from tightfit.planner.request import Request, Tracer
from tightfit.tracing.random_states import STATE
from tightfit.tracing.record import Phase
from tiny import allocator_peak

WIDTH, BLOCKS = 4, 4
WRAPPED = 64  # bytes of numbers that Python wraps


class OwnNoise(nn.Module):
    """Drops by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.generator) > 0.1)


class Attention(nn.Module):
    """Drops attention weights."""

    def forward(self, x):
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x):
        return x + self.draw(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Model(nn.Module):
    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(draw()) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(size=8):
    return {"x": torch.randn(size, 2, WIDTH, generator=torch.Generator().manual_seed(0))}


DRAWS = {
    "dropout": lambda: nn.Dropout(0.1),
    "a generator of its own": OwnNoise,
    "slopes": nn.RReLU,
    "attention": Attention,
}
LEVERS = {
    "no lever": lambda model: [],
    "recompute": lambda model: [recompute(model, "blocks.*")],
    "joined blocks": lambda model: [recompute(model, "blocks.*", segments=2)],
    "offload": lambda model: [offload(model, "blocks.*", smallest=16, recompute=True)],
    "offload beside recompute": lambda model: [
        offload(model, "blocks.[01]", smallest=16),
        recompute(model, "blocks.[23]"),
    ],
    "capture beside recompute": lambda model: [
        capture(model, "blocks.[01]", policy=RECOMPUTE_ALL),
        recompute(model, "blocks.[23]"),
    ],
}
NOT_CAPTURED = ("a generator of its own", "capture beside recompute")  # a program takes no generator


@pytest.mark.sampled(5)
@pytest.mark.keeps("states-of-generators-counted")
@pytest.mark.parametrize(("draw", "lever"), [pair for pair in itertools.product(DRAWS, LEVERS) if pair != NOT_CAPTURED])
def test_the_states_that_a_lever_reads_are_in_the_predicted_peak(draw, lever):
    model = Model(DRAWS[draw])
    LEVERS[lever](model)
    predicted = tightfit.estimate(model, batch(), loss=loss, device=round_device()).peak_bytes
    assert abs(allocator_peak(model, batch(), loss=loss) - predicted) <= WRAPPED


@pytest.mark.keeps("states-of-generators-counted")
@pytest.mark.parametrize(
    ("levers", "budget", "micro_batches"), [(["recompute"], "0.8x", 1), (["recompute", "micro_batch"], "0.6x", 2)]
)
def test_a_plan_counts_them_within_its_budget(levers, budget, micro_batches):
    model = Model(DRAWS["dropout"])
    plan = tightfit.plan(model, batch(32), budget, loss=loss, levers=levers, device=round_device())
    assert plan.micro_batches == micro_batches
    with plan.apply(model):
        taken = allocator_peak(model, batch(32), loss=loss, micro_batches=plan.micro_batches)
    assert abs(taken - plan.peak_bytes) <= WRAPPED
    assert plan.budget_bytes - 2 * torch.get_rng_state().nbytes < taken <= plan.budget_bytes
    assert tightfit.verify(model, batch(32), plan, loss=loss).ok


class ReadsState(Model):
    """Reads the state of PyTorch's generator for a moment, as people do who log it."""

    def forward(self, x):
        hash(torch.get_rng_state().numpy().tobytes())
        return super().forward(x)


def test_a_state_that_is_freed_before_the_next_operator_is_counted():
    model, few = ReadsState(nn.Identity), batch(1)
    predicted = tightfit.estimate(model, few, loss=loss, device=round_device()).peak_bytes
    assert (
        predicted > torch.get_rng_state().nbytes + tightfit.estimate(Model(nn.Identity), few, loss=loss).peak_bytes / 2
    )
    assert abs(allocator_peak(model, few, loss=loss) - predicted) <= WRAPPED


def test_on_a_card_the_states_of_its_generator_are_not_in_its_memory():
    model = Model(DRAWS["dropout"])
    request = Request.of(model, batch(), loss=loss, device=lookup("rtx4090")).checked()
    recompute(model, "blocks.*")
    trace = Tracer(request).whole(request.plain, {})
    assert any(operator.phase is Phase.RECOMPUTE and "dropout" in operator.name for operator in trace.operators)
    assert all(operator.name != STATE for operator in trace.operators)
