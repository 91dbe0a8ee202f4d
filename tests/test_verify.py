"""Verification finds what a plan changes, and names the lever and the module."""

import random
from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from round_device import round_device
from tightfit import plan, verification, verify
from tightfit.errors import ModelError
from tightfit.levers.offload import store
from tightfit.levers.recompute import region
from tightfit.levers.recompute.recorder import Recorder
from tightfit.memory.disk import DiskRates
from tightfit.planner.levers import MicroBatches, Offload
from tiny import Stack, decoder, token_batch


@pytest.mark.keeps("verify-detects-plan-changes")
def test_a_broken_recompute_is_found_and_named(monkeypatch):
    model, batch = decoder(), token_batch(8)
    made = plan(model, batch, "0.65x")
    victim = next(c.path for c in made.choices if c.action != "keep")

    class Broken(Recorder):
        """Loses a little of every product of one block, all of which it sees."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "sees_functions": False})

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            return out * 1.001 if self.region == victim and func is torch.ops.aten.mm.default else out

    monkeypatch.setattr(region, "Recorder", Broken)
    report = verify(model, batch, made)
    assert not report.ok
    assert report.worst is not None
    assert report.worst.module == victim
    assert report.worst.lever == "recompute"
    assert "gradient" in report.worst.what or report.worst.what == "loss"
    assert victim in str(report)


@pytest.fixture
def offloading(monkeypatch):
    """A model, a batch and a plan whose blocks all offload and recompute."""
    monkeypatch.setattr("tightfit.planner.request.disk_rates", lambda folder: DiskRates(1e11, 1e11))
    model, batch = decoder(hidden_size=128, num_layers=4), token_batch(4, 128)
    made = plan(model, batch, "0.6x", levers=["recompute", "offload"])
    assert made.lever(Offload) is not None
    return model, batch, made


@pytest.mark.keeps("verify-detects-plan-changes")
def test_a_broken_offload_is_found_and_named(offloading, monkeypatch):
    model, batch, made = offloading
    victim = model.get_submodule([c.path for c in made.choices if c.offloaded][1])
    fetch, put, broken = store.DiskCopy.fetch, store.HostStore.put, []

    def noting(self, tensor):
        copy = put(self, tensor)
        if victim.running:
            broken.append(copy)
        return copy

    def corrupting(self):
        content = fetch(self)
        if any(self is copy for copy in broken):
            content.view(torch.uint8)[:64] ^= 1
        return content

    victim.running = False
    victim.register_forward_pre_hook(lambda *_: setattr(victim, "running", True))
    victim.register_forward_hook(lambda *_: setattr(victim, "running", False))
    monkeypatch.setattr(store.HostStore, "put", noting)
    monkeypatch.setattr(store.DiskCopy, "fetch", corrupting)
    report = verify(model, batch, made)
    assert broken
    assert not report.ok
    assert report.worst.lever == "offload"
    assert model.get_submodule(report.worst.module) is victim
    assert f"caused by offload in {report.worst.module}" in str(report)


@pytest.mark.slow  # a plan and five runs
@pytest.mark.keeps("verify-detects-plan-changes")
def test_a_broken_recompute_beside_offload_is_named(offloading, monkeypatch):
    model, batch, made = offloading
    original = region.RecordedForward.__call__
    monkeypatch.setattr(region.RecordedForward, "__call__", lambda self, *a, **k: original(self, *a, **k) * 1.001)
    assert verify(model, batch, made).worst.lever == "recompute"


@pytest.mark.slow  # a plan that offloads
def test_the_plain_run_opens_no_offload_store(offloading, monkeypatch):
    model, batch, made = offloading
    events, applied, opened = [], verification.apply_plan, Offload.offload_store

    def applying(plan, model):
        events.append("levers" if plan.choices else "plain")
        return applied(plan, model)

    def opening(lever):
        events.append("offload_store")
        return opened(lever)

    monkeypatch.setattr(verification, "apply_plan", applying)
    monkeypatch.setattr(Offload, "offload_store", opening)
    assert verify(model, batch, replace(made, levers=(*made.levers, MicroBatches(2)))).ok
    # plain twice, then what must be bit-equal; in fp64 and plain, then the whole plan
    assert events == ["plain", "plain", "levers", "offload_store", "plain", "plain", "levers", "offload_store"]


class Restless(nn.Module):
    """Not repeatable: every run of it differs."""

    def __init__(self):
        super().__init__()
        self.inner = decoder()
        self.runs = iter(range(1, 1000))

    def forward(self, input_ids, labels):
        return self.inner(input_ids, labels).loss * next(self.runs)


def test_a_plain_run_that_is_not_repeatable_is_told():
    model, batch = Restless(), token_batch(8)
    made = plan(model, batch, "0.7x")
    report = verify(model, batch, made)
    assert not report.repeatable
    assert "two plain runs differ" in str(report)


@pytest.mark.keeps("verify-detects-plan-changes")
@pytest.mark.slow  # a plan with every lever
def test_verification_leaves_the_model_as_it_was():
    model, batch = decoder(dropout=0.1), token_batch(8)
    made = plan(model, batch, "0.6x", levers="rounding")
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.get_rng_state()
    verify(model, batch, made)
    assert model.training
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())


def dropping(x):
    return F.dropout(x, 0.1)


@pytest.mark.keeps("levers-exact-rounding-gradients")
def test_rounding_is_granted_more_where_few_numbers_are_compared():
    granted = []
    for hidden in (8, 64):
        model, batch = decoder(hidden_size=hidden), token_batch()
        report = verify(model, batch, plan(model, batch, "0.98x", levers=["chunked_loss"], device=round_device()))
        granted.append(report.spread - verification.ROUNDING_SPREAD)
    assert granted[0] > granted[1] > 0


def test_gradients_that_are_not_finite_are_said_to_be(monkeypatch):
    model, batch = decoder(), token_batch()
    made = plan(model, batch, "0.98x", levers=["chunked_loss"], device=round_device())
    monkeypatch.setattr(verification, "rounding_errors", lambda *_: (float("nan"), float("nan")))
    report = verify(model, batch, made)
    assert not report.ok
    assert "the plain run's gradients are not finite" in str(report)


class Overflowing(nn.Module):
    """Runs its last layer unless a number is infinite, which it is in fp32 alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        if torch.isfinite(x * 1e38 * 1e38).all():
            x = x + self.last(x)
        return torch.tanh(x)


def test_a_model_that_takes_another_way_in_fp64_is_refused_in_one_line():
    def loss(model, batch):
        return model(batch["x"]).square().mean()

    model, batch = Overflowing(), {"x": torch.randn(512, 64)}
    made = plan(model, batch, "0.9x", loss=loss, levers=["micro_batch"], device=round_device(), optimizer="sgd")
    assert made.micro_batches > 1
    with pytest.raises(ModelError, match=r"there is a gradient of last\.bias in fp64 alone"):
        verify(model, batch, made, loss=loss)


def test_few_are_those_numbers_that_make_up_the_norm():
    model, batch = decoder(), token_batch()
    made = plan(model, batch, "0.98x", levers=["chunked_loss"], device=round_device())

    def granted(gradient):
        changed = verification.ChangedValues({"loss": torch.ones(()), "gradient of x": gradient}, {})
        return verification.rounding_spread(changed, made) - verification.ROUNDING_SPREAD

    alike, one = torch.ones(10_000), torch.full((10_000,), 1e-6)
    one[17] = 5.0
    assert granted(alike) == pytest.approx(verification.FEW_NUMBERS / 100)
    assert granted(one) == pytest.approx(verification.FEW_NUMBERS)
    assert granted(torch.zeros(4)) == pytest.approx(verification.FEW_NUMBERS)


DROPPED_BY_FUNCTIONS = {
    "dropout": dropping,
    "in place": lambda x: F.dropout(2 * x, 0.1, inplace=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "in a checkpoint": lambda x: checkpoint(dropping, x, use_reentrant=False),
}


class Dropping(nn.Module):
    """Blocks that drop by a function, in training and in evaluation."""

    def __init__(self, drop):
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.blocks = drop, nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x)))
        return x.square().mean()


@pytest.mark.keeps("verify-detects-plan-changes")
@pytest.mark.parametrize("drop", DROPPED_BY_FUNCTIONS)
def test_micro_batches_of_a_model_that_drops_by_functions_are_verified_without_dropout(drop):
    model, batch = Dropping(DROPPED_BY_FUNCTIONS[drop]), {"x": torch.randn(32, 8, 16)}
    made = plan(model, batch, "0.5x", levers=["micro_batch"], device=round_device())
    report = verify(model, batch, made)
    assert made.micro_batches > 1
    assert report.ok
    assert report.planned_error < 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["loss", "buffers"])
def test_buffers_and_losses_are_compared(what, monkeypatch):
    model, batch = decoder(), token_batch(8)
    model.register_buffer("moved", torch.zeros(3))
    made = plan(model, batch, "0.7x")
    original = region.RecordedForward.__call__

    def tampering(self, *args, **kwargs):
        if what == "buffers":
            model.moved += 1
            return original(self, *args, **kwargs)
        return original(self, *args, **kwargs) + 1e-3

    monkeypatch.setattr(region.RecordedForward, "__call__", tampering)
    assert not verify(model, batch, made).ok


@pytest.mark.sampled(1)
@pytest.mark.keeps("verify-leaves-generators")
@pytest.mark.parametrize("own", [torch.Generator, numpy.random.default_rng, numpy.random.RandomState, random.Random])
def test_a_generator_that_a_module_holds_is_compared(own, monkeypatch):
    model, batch = decoder(), token_batch(8)
    model.own = own()
    made = plan(model, batch, "0.7x")
    assert verify(model, batch, made).ok
    original = region.RecordedForward.__call__

    def drawing(self, *args, **kwargs):
        torch.randn(3, generator=model.own) if own is torch.Generator else model.own.random()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(region.RecordedForward, "__call__", drawing)
    with numpy.printoptions(threshold=3):  # a state as text would be its first and last numbers
        report = verify(model, batch, made)
    assert "random state" in str(report)
    assert not report.ok


@pytest.mark.slow  # a plan of micro-batches
def test_micro_batches_whose_losses_do_not_add_up_are_found_and_said():
    def mean(model, batch):
        return model(**batch).loss

    model, batch = decoder(), token_batch(8)
    made = plan(model, batch, "0.4x", levers=["micro_batch"], loss=mean)
    assert verify(model, batch, made, loss=mean).ok
    mean.reduction = "sum"
    report = verify(model, batch, made, loss=mean)
    assert not report.ok
    assert str(report).startswith("NOT EQUAL: error of the gradients against fp64")


class Writing(nn.Module):
    """A forward that normalises its input, a weight and a list of its own in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        )
        self.scale = nn.Parameter(torch.rand(64) + 1, requires_grad=False)
        self.seen = [torch.zeros(64)]

    def forward(self, x, history):
        x.sub_(0.5).div_(0.25)
        self.scale.div_(self.scale.norm())
        self.seen[0].add_(x.detach().mean(0))
        history.append(x.detach().mean())
        return (self.layers(x) * self.scale + self.seen[0]).square().mean() * len(history)


@pytest.mark.keeps("verify-dry-runs-leave")
def test_a_forward_that_writes_into_batch_weights_and_attributes_is_verified_and_leaves_them():
    model, batch = Writing(), {"x": torch.rand(256, 64), "history": []}
    held = [batch["x"], model.scale, model.seen[0]]
    before, versions = [tensor.clone() for tensor in held], [tensor._version for tensor in held]

    def loss(model, batch):
        return model(batch["x"], batch["history"])

    made = plan(model, batch, "0.8x", loss=loss, levers=["recompute"], device=round_device())
    assert str(verify(model, batch, made, loss=loss)).startswith("bit-equal")
    assert all(map(torch.equal, held, before))
    assert [tensor._version for tensor in held] == versions
    assert batch["history"] == []


@pytest.mark.keeps("verify-dry-runs-leave")
def test_a_loss_that_takes_its_labels_out_of_the_batch_is_verified():
    model, batch = Writing().layers, {"x": torch.rand(256, 64, requires_grad=True), "y": torch.rand(256, 64)}

    def loss(model, batch):
        labels = batch.pop("y")
        return (model(batch["x"]) - labels).square().mean()

    made = plan(model, batch, "0.8x", loss=loss, levers=["recompute"], device=round_device())
    assert str(verify(model, batch, made, loss=loss)).startswith("bit-equal")
    assert batch["x"].grad is None
    assert list(batch) == ["x", "y"]


@pytest.mark.keeps("verify-detects-plan-changes")
def test_a_plan_that_keeps_what_dropout_computes_is_verified_without_a_warning():
    """Rounding is judged without dropout, so that its blocks run other operators than planned, and rightly."""
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)]
    model, batch = Stack(*blocks), {"x": torch.randn(64, 32)}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    made = plan(model, batch, "0.8x", loss=loss, levers=["recompute", "micro_batch"], micro_batches=2)
    assert "dropout" in str(made) or "div_" in str(made)
    assert verify(model, batch, made, loss=loss).ok
