"""Forward-mode differentiation inside a loss: tangents of zeros take no memory, and questions about shapes none."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, vmap

import tightfit
from exactness import assert_bit_equal, run
from round_device import round_device
from tightfit.errors import CannotFit
from tiny import Stack, allocator_peak

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own forward AD uses it


class Block(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def flow():
    torch.manual_seed(0)
    return Stack(*(Block() for _ in range(3)))


def batch():
    torch.manual_seed(1)
    return {"z": torch.randn(4, 16, 32), "v": torch.randn(4, 16, 32)}


def mean_flow(model, b):
    u, moved = jvp(model, (b["z"],), (b["v"],))
    return (u - (b["v"] - 0.3 * moved).detach()).square().mean()


def learnt_tangent(model, b):
    u, moved = jvp(model, (b["z"],), (b["v"],))
    return (u + moved).square().mean()


def dual(model, b):
    with forward_ad.dual_level():
        u, moved = forward_ad.unpack_dual(model(forward_ad.make_dual(b["z"], b["v"])))
        return (u - (b["v"] - 0.3 * moved).detach()).square().mean()


def of_parameters(model, b):
    parameters = dict(model.named_parameters())
    ones = {name: torch.ones_like(value) for name, value in parameters.items()}
    u, moved = jvp(lambda p: functional_call(model, p, (b["z"],)), (parameters,), (ones,))
    return (u + moved).square().mean()


def of_a_number(model, b):
    return jacfwd(lambda scale: model(b["z"] * scale))(torch.ones(())).square().mean()


def of_a_gradient(model, b):
    found, moved = jvp(grad(lambda z: model(z).square().sum()), (b["z"],), (b["v"],))
    return (found + moved).square().mean()


def mapped(model, b):
    return vmap(model)(b["z"]).square().mean()


LOSSES = [mean_flow, learnt_tangent, dual, of_parameters, of_a_number, of_a_gradient, mapped]


@pytest.mark.sampled(3)
@pytest.mark.keeps("estimates-steps-forward-mode")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_the_estimate_is_the_measured_peak(loss):
    found = tightfit.estimate(flow(), batch(), loss=loss, optimizer="sgd", device=round_device())
    assert found.peak_bytes == allocator_peak(flow(), batch(), loss=loss, optimizer="sgd")


@pytest.mark.parametrize("loss", [mean_flow, dual], ids=lambda loss: loss.__name__)
def test_micro_batches_halve_it_and_levers_of_blocks_step_aside(loss):
    options = {"loss": loss, "optimizer": "sgd", "device": round_device()}
    with pytest.raises(CannotFit):
        tightfit.plan(flow(), batch(), "0.75x", **options)
    plan = tightfit.plan(flow(), batch(), "0.75x", levers="rounding", **options)
    assert [lever.name for lever in plan.levers] == ["micro_batch"]
    assert tightfit.verify(flow(), batch(), plan, loss=loss).ok


@pytest.mark.keeps("estimates-steps-forward-mode")
def test_a_recomputed_block_of_dual_numbers_has_the_plain_gradients():
    plain = run(flow(), batch(), dual)
    assert_bit_equal(plain, run(flow(), batch(), dual, levers=lambda model: tightfit.recompute(model, "layers.*")))
