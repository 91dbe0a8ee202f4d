"""Verification finds what a plan changes, and names the lever and the module."""

import pytest
import torch
from torch import nn

from tightfit import plan, verify
from tightfit.levers.recompute import region
from tightfit.levers.recompute.recorder import Recorder
from tiny import decoder, token_batch


def test_a_broken_recompute_is_found_and_named(monkeypatch):
    model, batch = decoder(), token_batch(8)
    made = plan(model, batch, "0.65x")
    victim = next(c.path for c in made.choices if c.action != "keep")

    class Broken(Recorder):
        """Loses a little of every product of one block."""

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
