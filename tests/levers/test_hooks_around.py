"""Saved-tensor hooks that other code sets around blocks see what autograd saves of them, under every lever."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trap_levers import LEVERS

import tightfit
from exactness import assert_bit_equal, run
from tiny import Stack, allocator_peak

hooks = torch.autograd.graph.saved_tensors_hooks


class Mixing(nn.Module):
    """A block that saves inputs, weights and results of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(self.norm(x)))).tanh()


def in_16_bits():
    return hooks(lambda tensor: tensor.bfloat16(), lambda held: held.float())


def by_position():
    """Hooks that halve numbers when they load them, so that whether they ran shows in each gradient."""
    return hooks(lambda tensor: [tensor.detach().clone()], lambda held: held[0] * 0.5)


CONTEXTS = {"16 bits": in_16_bits, "halved": by_position, "host": torch.autograd.graph.save_on_cpu}
OTHERS = {
    "captured": lambda model: tightfit.capture(model, "layers.*"),
    "captured and recomputed": lambda model: tightfit.recompute(model, "layers.*"),
    "offloaded": lambda model: tightfit.offload(model, "layers.*"),
    "streamed": lambda model: tightfit.stream(model, "layers.*"),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack(*(Mixing() for _ in range(3)))


def under(context):
    def loss(model, x):
        with context():
            return model(x).square().mean()

    return loss


@pytest.mark.sampled(13)
@pytest.mark.parametrize("lever", [*LEVERS, *OTHERS])
@pytest.mark.parametrize("context", CONTEXTS)
def test_levers_within_saved_tensor_hooks_keep_every_bit(context, lever):
    frozen = lever == "streamed"
    made = model().requires_grad_(not frozen)
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    loss = under(CONTEXTS[context])
    plain = run(copy.deepcopy(made), x, loss, times=3)
    x.grad = None
    assert_bit_equal(plain, run(made, x, loss, levers={**LEVERS, **OTHERS}[lever], times=3))


def test_hooks_see_each_saved_tensor_once():
    def counted(levers):
        seen = []

        def save(tensor):
            seen.append(tuple(tensor.shape))
            return tensor

        made, x = model(), torch.ones(4, 8)
        with levers(made) if levers else nullcontext():
            with hooks(save, lambda tensor: tensor):
                found = made(x).sum()
            found.backward()
        return sorted(seen)

    assert counted(None) == counted(LEVERS["whole blocks"])


def test_a_block_in_a_checkpoint_saves_nothing_there():
    made, x = model(), torch.ones(4, 8, requires_grad=True)

    def loss(model, x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()

    plain = run(copy.deepcopy(made), x, loss)
    x.grad = None
    assert_bit_equal(plain, run(made, x, loss, levers=LEVERS["whole blocks"]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_plan_within_saved_tensor_hooks_is_verified(context):
    layer = nn.TransformerEncoderLayer
    made = Stack(*(layer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)))
    batch = {"x": torch.randn(8, 6, 16)}

    def loss(model, batch):
        return under(CONTEXTS[context])(model, batch["x"])

    plan = tightfit.plan(made, batch, "0.9x", loss=loss, levers="exact", optimizer="sgd")
    assert plan.peak_bytes < plan.plain_peak_bytes
    assert tightfit.verify(made, batch, plan, loss=loss).ok
    with plan.apply(made):
        assert allocator_peak(made, batch, loss=loss, optimizer="sgd") == pytest.approx(plan.peak_bytes, abs=128)
