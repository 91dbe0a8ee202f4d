"""Plans for a card offload to pinned host memory where that is named: copies go on beside the computation."""

from dataclasses import replace

import pytest

import tightfit
from tightfit.devices.figures import copy_rates
from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, LeverError
from tightfit.levers.offload.lever import INPUTS_ONLY
from tightfit.levers.recompute.policy import OFFLOAD_ALL
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.levers import Combination, Offload
from tightfit.planner.request import Request, Tracer
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.tracing.copies import AWAY, BACK, WAIT

BLOCKS = [f"layers.{i}" for i in range(6)]


def linked(rate):
    """An H200 with another link to its host, in bytes a second; its streams' share of it is what copies reach."""
    h200 = lookup("h200")
    return replace(h200, roofline=replace(h200.roofline, link_bytes_per_second=rate))


@pytest.fixture(scope="module")
def model():
    shape = DecoderConfig(hidden_size=256, num_layers=6, num_heads=4, vocab_size=600, max_position_embeddings=4096)
    return tightfit.build_dry(lambda: Decoder(shape))


@pytest.fixture(scope="module")
def batch():
    return tightfit.TokenBatch(8, 1024, 600)


def traced(model, batch, rate, policies):
    request = Request.of(
        model, batch, optimizer="sgd", precision="bf16", device=linked(rate), levers=["offload"]
    ).checked()
    return Tracer(request).whole(Combination(), policies)


def test_offload_lowers_the_predicted_peak_of_a_card_and_a_slow_link_costs_seconds(model, batch):
    plain = traced(model, batch, 1e12, {})
    quick = traced(model, batch, 1e15, dict.fromkeys(BLOCKS, OFFLOAD_ALL))
    slow = traced(model, batch, 1e9, dict.fromkeys(BLOCKS, OFFLOAD_ALL))
    assert quick.peak_bytes == slow.peak_bytes < 0.8 * plain.peak_bytes
    assert quick.step_seconds == pytest.approx(plain.step_seconds, rel=1e-3)
    moved = sum(o.copied_bytes for o in slow.operators if o.name == AWAY)
    assert moved == sum(o.copied_bytes for o in slow.operators if o.name == BACK) > 0
    link_seconds = 2 * moved / copy_rates(linked(1e9)).away
    waited = sum(o.seconds for o in slow.operators if o.name == WAIT)
    assert slow.step_seconds == pytest.approx(plain.step_seconds + waited, rel=1e-6)
    assert link_seconds - plain.step_seconds <= waited <= link_seconds


@pytest.mark.keeps("plan-card-offloads-computation")
@pytest.mark.slow  # four plans
def test_a_plan_for_a_card_offloads_where_copies_hide_and_is_never_slower_for_being_allowed_to(model, batch):
    for rate, hides in ((1e15, True), (1e9, False)):
        # One step: of many, captured blocks of so small a model would be faster than what hidden copies save.
        how = {"device": linked(rate), "precision": "bf16", "steps": 1}
        without = tightfit.plan(model, batch, "0.5x", levers=["recompute"], **how)
        allowed = tightfit.plan(model, batch, "0.5x", levers=["recompute", "offload"], **how)
        assert allowed.planned.peak_bytes <= allowed.budget_bytes
        assert allowed.planned.step_seconds <= without.planned.step_seconds * (1 + 1e-9)
        offload = allowed.lever(Offload)
        assert (offload is not None) == hides
        if offload is not None:
            assert offload.host
            assert allowed.planned.step_seconds < without.planned.step_seconds
            assert "to pinned host memory." in str(allowed)
            assert "offloaded: its input" in str(allowed)


@pytest.mark.slow  # two searches in which nothing fits at first
def test_the_least_that_a_plan_reaches_holds_little_that_is_on_its_way_to_the_host():
    """Behind the last block stands a wide head: all that the blocks still send away lies beside its logits."""
    shape = DecoderConfig(hidden_size=256, num_layers=12, num_heads=4, vocab_size=12_000, max_position_embeddings=1024)
    wide, tokens = tightfit.build_dry(lambda: Decoder(shape)), tightfit.TokenBatch(4, 1024, 12_000)
    how = {"device": "h200", "precision": "bf16", "optimizer": "sgd", "levers": ["recompute", "offload"]}
    with pytest.raises(CannotFit) as raised:
        tightfit.plan(wide, tokens, 1, **how)
    request = Request.of(wide, tokens, **how).checked()
    expected = (
        Tracer(request).whole(Combination(), dict.fromkeys((f"layers.{i}" for i in range(12)), INPUTS_ONLY)).peak_bytes
    )
    assert raised.value.least_bytes <= expected + UNSEEN_BYTES
    plan = tightfit.plan(wide, tokens, raised.value.least_bytes, **how)
    assert plan.peak_bytes <= expected
    assert all(choice.offloads_inputs and not choice.offloaded for choice in plan.choices)


def test_a_plan_is_not_applied_where_the_host_has_less_memory_than_it_needs(model, batch, monkeypatch):
    plan = tightfit.plan(model, batch, "0.6x", device=linked(1e15), precision="bf16", levers=["offload"])
    monkeypatch.setattr("tightfit.memory.pinned.host_budget", lambda budget=None: 2**20)
    with pytest.raises(
        LeverError, match=r"^offload: the plan needs .* MiB in host memory, and may take 1\.00 MiB: free"
    ):
        plan.apply(model)
