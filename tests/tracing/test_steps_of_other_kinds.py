"""Optimizers that run the step again, or take sparse gradients alone, are refused in one line."""

import pytest
import torch
from torch import nn

import tightfit
from round_device import round_device
from tightfit.errors import InputError, TraceError
from tiny import Stack, allocator_peak

pytestmark = pytest.mark.keeps("optimizer-needs-closure-lbfgs")


class Sharpness(torch.optim.SGD):
    """SAM as it is published: `step` needs a closure, although its signature does not say so."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class Strict(torch.optim.SGD):
    def step(self, closure=None):
        if closure is None:
            raise LookupError("no closure")


def stack():
    return Stack(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4)))


def loss(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize(
    "ask", [tightfit.estimate, lambda *a, **k: tightfit.plan(*a, "0.8x", **k)], ids=["estimate", "plan"]
)
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness, Strict], ids=lambda kind: kind.__name__)
def test_an_optimizer_that_needs_a_closure_is_refused_in_one_line(kind, ask):
    model, asked = stack(), {"loss": loss, "device": round_device()}
    for optimizer in (kind(model.parameters()), lambda parameters: kind(list(parameters))):
        with pytest.raises(InputError, match=rf"^{kind.__name__}\.step\(\) wants a closure: .*tightfit\.trace") as told:
            ask(model, {"x": torch.randn(64, 32)}, optimizer=optimizer, **asked)
        assert "\n" not in str(told.value)
    assert all(p.grad is None for p in model.parameters())


def test_the_loop_of_one_can_be_traced_as_the_line_says():
    model, x = stack(), torch.randn(64, 32)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    assert tightfit.trace(lambda: optimizer.step(closure), device=round_device()).peak_bytes > 0


def test_another_error_of_a_step_is_the_optimizers_own():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        tightfit.estimate(stack(), {"x": torch.randn(8, 32)}, loss=loss, optimizer=lambda p: Failing(list(p)))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(500, 32, sparse=True)
        self.bag = nn.EmbeddingBag(500, 32, sparse=True)
        self.layers = stack()

    def forward(self, x):
        return self.layers(self.embed(x) + self.bag(x)[:, None])


def test_sparse_adam_is_refused_in_one_line():
    batch = {"x": torch.randint(500, (8, 64))}

    def sparse(parameters):
        return torch.optim.SparseAdam([p for p in parameters if p.shape == (500, 32)])

    with pytest.raises(TraceError, match=r"^SparseAdam takes sparse gradients alone"):
        tightfit.estimate(Sparse(), batch, loss=loss, optimizer=sparse, device=round_device())


def test_sparse_gradients_are_verified():
    batch = {"x": torch.randint(500, (8, 64))}
    asked = {"loss": loss, "optimizer": "sgd", "device": round_device()}
    plan = tightfit.plan(Sparse(), batch, "0.8x", levers=["recompute"], **asked)
    assert allocator_peak(Sparse(), batch, loss=loss, optimizer="sgd") > 0
    assert str(tightfit.verify(Sparse(), batch, plan, loss=loss)).startswith("bit-equal")
