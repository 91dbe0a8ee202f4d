"""Captured blocks on a card take the bytes that a dry run without one predicts.

In segments that grow, where allocated bytes do not depend on what was split before.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from three_steps import peak_of_the_third

import tightfit
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL
from tightfit.tracing.build import build_dry
from tiny import decoder, token_batch

pytestmark = pytest.mark.keeps("card-traps-captured-recomputed")


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("growing_segments")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", [KEEP_ALL, RECOMPUTE_ALL], ids=["keep all", "recompute all"])
def test_captured_blocks_take_the_predicted_bytes_on_a_card(policy, precision):
    dry, batch = build_dry(decoder), token_batch(8)
    with tightfit.capture(dry, "layers.*", policy=policy):
        predicted = tightfit.estimate(dry, batch, device="cuda", precision=precision).peak_bytes
    plain = tightfit.estimate(dry, batch, device="cuda", precision=precision).peak_bytes
    model = decoder().cuda()
    with tightfit.capture(model, "layers.*", policy=policy):
        measured = peak_of_the_third(model, {name: tensor.cuda() for name, tensor in batch.items()}, precision)
    assert measured == predicted
    assert (predicted < plain) == (policy == RECOMPUTE_ALL)


@pytest.mark.usefixtures("growing_segments")
def test_a_plan_with_captured_blocks_takes_its_peak_on_a_card():
    batch = token_batch(64)
    plan = tightfit.plan(
        build_dry(decoder), batch, "0.75x", levers=["recompute", "capture"], device="cuda", precision="bf16"
    )
    assert any(choice.captured for choice in plan.choices)
    model = decoder().cuda()
    with plan.apply(model):
        assert (
            peak_of_the_third(model, {name: tensor.cuda() for name, tensor in batch.items()}, "bf16") == plan.peak_bytes
        )
    assert plan.peak_bytes <= plan.budget_bytes


class Repeated(torch.nn.Module):
    """A model whose blocks run some times in each step. Autocast casts their weights once for all of these runs."""

    def __init__(self, times):
        super().__init__()
        self.times, self.model = times, decoder(hidden_size=256, num_layers=3)

    def forward(self, **batch):
        return SimpleNamespace(loss=sum(self.model(**batch).loss for _ in range(self.times)))


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("times", [1, 2])
def test_blocks_recomputed_by_hand_take_the_predicted_bytes_though_autocast_begins_with_the_recorder(times):
    """Segments do not grow here: what the first step leaves behind splits them otherwise."""
    batch = token_batch(64, 61)
    dry = build_dry(partial(Repeated, times))
    with tightfit.recompute(dry, "model.layers.*"):
        predicted, again = (
            tightfit.estimate(dry, batch, device="cuda", precision="bf16").step_figures for _ in range(2)
        )
    model = Repeated(times).cuda()
    with tightfit.recompute(model, "model.layers.*"):
        measured = peak_of_the_third(model, {name: tensor.cuda() for name, tensor in batch.items()}, "bf16")
    reserved = torch.cuda.max_memory_reserved()
    assert predicted.peak_bytes == again.peak_bytes
    assert (measured, reserved) == (predicted.peak_bytes, predicted.reserved_bytes)
